"""Packages of the wheel, with `ds_configs/` and `launch/` inside `fmmeta`; pyproject.toml has all else."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["fmmeta", "fmmeta.*"]), "fmmeta.ds_configs", "fmmeta.launch"],
    package_dir={"fmmeta.ds_configs": "ds_configs", "fmmeta.launch": "launch"},
)
