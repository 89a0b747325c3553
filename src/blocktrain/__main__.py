"""The program's beginning and end, for `python -m blocktrain` and the script `blocktrain`."""

from blocktrain.starting import leave, prepare


def main() -> None:
    prepare()
    from blocktrain.cli.main import main as run_verb  # not above: Ctrl-C is to work while it loads

    try:
        run_verb()
    except SystemExit as ended:
        leave(ended.code)
        raise
    leave(None)


if __name__ == "__main__":
    main()
