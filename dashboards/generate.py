"""Write the dashboards as JSON, for Grafana to import. To be run after a change of any of them."""

from __future__ import annotations

import argparse
from pathlib import Path

from cache_view import CACHE_VIEW
from cost_view import COST
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from training_view import TRAINING


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="folder (default: %(default)s)")
    folder: Path = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    for view in (TRAINING, CACHE_VIEW, COST):
        text = JSONEncoder(sort_keys=True, indent=2).encode(view.build())
        (folder / f"refill-{view.name}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
