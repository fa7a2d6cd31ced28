"""Puts what lies beside the package into its wheel: experiments, launch files, the citation."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = "configs", "launch", "CITATION.cff"


class BuildWithFiles(build_py):
    """Copies what `heron.base.shipped` finds; an editable install reads the checkout."""

    def run(self) -> None:
        """Builds the package, and copies the files into it."""
        super().run()
        if self.editable_mode:
            return
        for name in SHIPPED:
            source, target = Path(__file__).parent / name, Path(self.build_lib) / "heron" / name
            if source.is_dir():
                shutil.copytree(source, target, dirs_exist_ok=True)
            else:
                shutil.copy2(source, target)


setup(cmdclass={"build_py": BuildWithFiles})
