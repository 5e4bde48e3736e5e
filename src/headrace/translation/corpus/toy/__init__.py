"""The built-in corpus: `grammar.txt` has the words and sentence templates, `grammar` draws
sentences from them, and `generator` makes a corpus of different ones."""
