"""From files of parallel text to batches of ids.

`pair_files` finds the files, `text_files` opens them, and `pair_formats` reads pairs of the two
`languages`, from `pair_tables` or `pair_json`. `corpus` cleans the pairs into splits, one of them
`held_out` (`toy` generates some if there is no data), and `corpus_report` says what was left out.
`vocabulary` turns text into ids, with the help of `sentencepiece_trainer`. `prepare` stores the ids
(`encoding`) as `encoded` pairs in a `prepared` folder. `batches` decides about the `division` into
batches, which the `loader` loads; `packed` puts pairs end to end instead of padding (`packing`).
"""
