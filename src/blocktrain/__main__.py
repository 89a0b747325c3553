"""The program's beginning, for `python -m blocktrain` and the script `blocktrain`."""

from blocktrain.starting import prepare


def main() -> None:
    prepare()
    from blocktrain.cli.main import main as run_verb  # not above: Ctrl-C is to work while it loads

    run_verb()


if __name__ == "__main__":
    main()
