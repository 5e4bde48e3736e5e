"""From files of parallel text to batches of ids.

`pair_files` finds the files, `text_files` opens them, and `pair_formats` reads pairs of the two
`languages`. `corpus` cleans the pairs into splits, one of them `held_out`
(`toy` generates some if there is no data). `vocabulary` turns text into ids, with the help of
`sentencepiece_trainer`. `prepare` stores the ids as `encoded` pairs in a `prepared` folder, and
`batches` decides which pairs make up which batch; `packed` puts them end to end instead of padding.
"""
