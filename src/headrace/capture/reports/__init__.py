"""What became of graphs, in numbers and in words: replays, eager calls and why, checks."""
