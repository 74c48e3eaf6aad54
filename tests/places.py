"""Where the project lies: tests move, it does not."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
