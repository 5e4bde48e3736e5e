"""`python -m headrace`: the command line, also from a source tree."""

from headrace.cli import main

if __name__ == "__main__":
    main()
