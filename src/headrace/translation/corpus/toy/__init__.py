"""The built-in corpus: `lexicon` holds words, `sentences` the grammar; `generator` draws pairs."""
