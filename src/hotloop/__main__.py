"""`python -m hotloop` is the `hotloop` command."""

from hotloop.cli import main

if __name__ == "__main__":  # worker processes import this file too
    main()
