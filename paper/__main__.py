"""Lists the programs of this package."""

from paper import figures, probes, tables

if __name__ == "__main__":
    for module in (tables, figures, probes):
        summary = module.__doc__.partition("\n")[0]
        print(f"python -m {module.__name__:14} {summary}")
