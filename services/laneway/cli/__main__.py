"""`python -m laneway.cli`: the same as `laneway`."""

from laneway.cli.main import main

if __name__ == "__main__":
    main()
