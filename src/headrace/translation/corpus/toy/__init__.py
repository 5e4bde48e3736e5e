"""The built-in grammar, from words to sentences; `translation.grammar` makes a corpus of them."""
