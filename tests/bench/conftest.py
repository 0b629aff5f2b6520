"""The bench's modules import each other as scripts beside each other do."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "bench"))
