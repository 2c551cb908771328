"""What a family imports from its own package is part of its source, wherever the package lies; what others have is not."""

from __future__ import annotations

from pathlib import Path

from proxy_models.architecture.source_files import source_files

FILES = {
    "lab/__init__.py": "from lab import unrelated",
    "lab/unrelated.py": "",
    "lab/family.py": "import json\nimport torch\nfrom proxy_models import Family\nfrom lab.model import Network\nfrom . import rates",
    "lab/model.py": "from .layers.scan import scan\n\ndef late():\n    import lab.late, lab.family",
    "lab/layers/__init__.py": "",
    "lab/layers/scan.py": "from lab.layers import missing",
    "lab/rates.py": "",
    "lab/late.py": "",
    "lab/torch.py": "",
    "alone.py": "import beside\nfrom lab import family\nimport torch",
    "beside.py": "",
}


def written(root: Path) -> Path:
    for name, content in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def test_files_of_a_package_are_those_that_are_imported(tmp_path: Path) -> None:
    first = source_files("lab.family", written(tmp_path / "here") / "lab/family.py")
    assert list(first) == [
        "lab/family.py",
        "lab/late.py",
        "lab/layers/__init__.py",
        "lab/layers/scan.py",
        "lab/model.py",
        "lab/rates.py",
    ]
    assert first["lab/model.py"].decode() == FILES["lab/model.py"]
    assert list(first.items()) == list(
        source_files("lab.family", written(tmp_path / "there") / "lab/family.py").items()
    )


def test_a_module_in_no_package_has_those_beside_it(tmp_path: Path) -> None:
    assert list(source_files("alone", written(tmp_path) / "alone.py")) == ["alone.py", "beside.py"]
    assert list(source_files("lab", tmp_path / "lab/__init__.py")) == ["lab/__init__.py", "lab/unrelated.py"]
