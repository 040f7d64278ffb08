"""The README for the package index, with links that lead to the repository.

All other metadata stands in pyproject.toml, the repository's address among them.
"""

import re
import runpy
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
LINK = re.compile(r"(!?)(\[[^\]]*\])\(([^)\s]+)\)")


def readme() -> str:
    """Return README.md with the relative links made absolute."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    home = project["urls"]["Homepage"]

    def absolute(link: re.Match[str]) -> str:
        picture, text, target = link.groups()
        if target.startswith("https://"):
            return link[0]
        folder = (ROOT / target.partition("#")[0]).is_dir()
        kind = "raw" if picture else "tree" if folder else "blob"
        return f"{picture}{text}({home}/{kind}/main/{target})"

    return LINK.sub(absolute, (ROOT / "README.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    runpy.run_path(str(ROOT / "fedntk" / "__init__.py"))  # refuses a clone without links
    setup(long_description=readme(), long_description_content_type="text/markdown")
