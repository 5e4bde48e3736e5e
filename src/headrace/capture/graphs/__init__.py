"""A function as graphs by key: `CapturedFunction` watches, captures, replays and checks again."""
