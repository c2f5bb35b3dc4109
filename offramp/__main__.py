"""The command line: `python -m offramp`, and the script `offramp`."""


def main() -> None:
    """Runs a command. Ctrl-C ends it with status 130, also while its modules are imported."""
    try:
        from offramp.cli.app import main as run

        run()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
