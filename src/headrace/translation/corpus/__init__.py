"""From files of parallel text to batches of ids.

`pair_files` finds files and reads pairs, `corpus` cleans them into splits (`toy` generates some if
there is no data), `vocabulary` turns text into ids, `prepare` stores the ids as `encoded` pairs in
a `prepared` folder, and `batches` decides which pairs make up which batch.
"""
