"""What of the papers comes out here: each table and figure that is reproduced, in its smallest full form, on one page.

make papers          # two minutes on two cores; PAPERS_FLAGS=--whole: Redox Table 6 at its full size
"""

from __future__ import annotations

import argparse

from benchmarks.machine import machine
from benchmarks.papers import coordl, deepio, deli, shade, table6
from benchmarks.papers.page import print_rows

_PART = 16
"""One part of so many of Table 6's dataset; remote requests with prefetch are then up to a fifth more."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--whole", action="store_true", help="Redox Table 6 at its full size: some minutes")
    part = 1 if parser.parse_args().whole else _PART
    print(f"{machine()}; rows that begin with EXACT: an outside simulation of the paper's rules, else as printed")
    of_part = f", one part of {part} of ImageNet-1k" if part > 1 else ""
    print_rows(f"Redox, Table 6{of_part}: python -m benchmarks.papers.table6", table6.rows(part))
    print_rows("DELI: python -m benchmarks.papers.deli, .epochs, .cost_compare", deli.rows())
    print_rows("SHADE: python -m benchmarks.papers.shade", shade.rows())
    print_rows("CoorDL: python -m benchmarks.papers.coordl", coordl.rows())
    print_rows("DeepIO: python -m benchmarks.papers.deepio", deepio.rows())


if __name__ == "__main__":
    main()
