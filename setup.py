"""Compiles the kernels into the package, where there is a C++ compiler; everything else is in pyproject.toml."""

from __future__ import annotations

import runpy
import subprocess
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

KERNELS = Path("src/dynafed/kernels")
levels: dict[str, Any] = runpy.run_path(str(KERNELS / "levels.py"))
compiler = levels["find_compiler"]()


class BuildKernels(build_ext):
    """A library for each level; in an editable installation, beside the sources, for this processor only."""

    def run(self) -> None:
        """Compile them; one that can't be compiled is left out."""
        here = self.inplace or self.editable_mode
        folder = KERNELS if here else Path(self.build_lib, "dynafed/kernels")
        folder.mkdir(parents=True, exist_ok=True)
        sources = levels["read_sources"](KERNELS)
        for level in (levels["own_level"](),) if here else levels["prebuilt_levels"]():
            for old in folder.glob(f"kernels-{level}-*.so"):
                old.unlink()
            library = (folder / levels["library_name"](sources, level)).absolute()
            try:
                subprocess.run(levels["compile_command"](compiler, level, str(library)), cwd=KERNELS, check=True)
            except (OSError, subprocess.CalledProcessError) as error:
                self.warn(f"no kernels for {level}: {error}")
                library.unlink(missing_ok=True)
            else:
                library.chmod(0o755)
                levels["seal"](library)

    def get_outputs(self) -> list[str]:
        """Nothing that others need to know."""
        return []

    def get_output_mapping(self) -> dict[str, str]:
        """The same."""
        return {}


class KernelsWheel(bdist_wheel):
    """A wheel for one platform, but for any Python: the libraries are called by address."""

    def get_tag(self) -> tuple[str, str, str]:
        """Python, ABI, platform."""
        tag = super().get_tag()
        return tag if self.root_is_pure else ("py3", "none", tag[2])


there = compiler and levels["prebuilt_levels"]()
setup(
    ext_modules=[Extension("dynafed.kernels", [str(KERNELS / name) for name in levels["SOURCES"]])] if there else [],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": KernelsWheel},
)
