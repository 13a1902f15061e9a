"""Write examples/data/preferences.jsonl, sample data of preference and reward: 24 users of dpo.py.

From this folder: python generate_preferences.py
"""

import json
from pathlib import Path

from dpo import draw

if __name__ == "__main__":
    with (Path(__file__).parent / "data" / "preferences.jsonl").open("w", encoding="utf-8") as file:
        for user in range(24):
            for row in (pair for pairs in draw(user) for pair in pairs):
                file.write(json.dumps({"task": f"user {user}", **row}) + "\n")
