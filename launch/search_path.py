"""Puts the repository root on the module search path, and nothing else.

`python launch/train.py` starts with launch/ on the path; configs import each other as
`from configs import base`, and the package is found here also when it is not installed.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
