"""Run the `tidelog` command as `python -m tidelog`."""

from tidelog.cli.entry import main

if __name__ == "__main__":
    main()
