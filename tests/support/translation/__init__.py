"""Small corpora and runs of the trainer."""
