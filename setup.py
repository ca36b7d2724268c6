"""Packaging of wespeaker_qmargin; see README.md for the two commands that set everything up."""

import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
VERSION = re.search(
    r'__version__ = "(.+?)"', (HERE / "wespeaker_qmargin" / "__init__.py").read_text()
).group(1)

setup(
    name="wespeaker-qmargin",
    version=VERSION,
    description="Q-Margin, a sparse alpha-divergence margin loss, as a head for WeSpeaker",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=["wespeaker_qmargin"],
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.6",
        "numpy",
        "scipy>=1.12",
        "pyyaml",
        "kaldiio",
        "soundfile",
        "soxr",
        "tqdm",
        "accelerate>=1.0",
        "matplotlib",  # the report's plots; WeSpeaker's score metrics import it too
        "tensorboard",  # training curves
        "markdown",  # tables of other commands in the report; tensorboard needs it too
    ],
    extras_require={
        "lmdb": ["lmdb"],  # only for MUSAN / RIR sources that upstream's make_lmdb.py wrote
        "ssl": ["transformers>=5.24", "peft"],  # WavLM and w2v-BERT encoders
        "s3prl": ["espnet-s3prl", "torchaudio", "omegaconf", "requests"],
        "voxceleb": ["imageio-ffmpeg"],  # an ffmpeg for VoxCeleb2's m4a, where there is none
        "demo": ["espeakng-loader"],  # synthetic voices (GPL-3) for a machine without any corpus
        "test": [
            "pytest",
            "pytest-xdist",
            "hypothesis",
            "ruff",
            "entmax",
            "transformers>=5.24",
            "peft",
            "imageio-ffmpeg",
            "onnx",  # what an exported model is run with
            "onnxscript",
            "onnxruntime",
            "kaldi-native-fbank",
            "lmdb",
            "espeakng-loader",
        ],
    },
    entry_points={"console_scripts": ["wespeaker-qmargin = wespeaker_qmargin.cli:main"]},
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Multimedia :: Sound/Audio :: Speech",
    ],
)
