"""From files of parallel text to batches of ids.

`sources` finds files and reads records, `corpus` cleans them into splits (`toy` generates some
where there is no data), `vocabulary` turns text into ids, `prepare` stores the ids once as
`encoded` pairs in a `prepared` folder, and `batches` decides which pairs make up which batch.
"""
