"""Which files of the application name the built-in decoder; all others ask the member or its family."""

import ast
from pathlib import Path

APPLICATION = Path(__file__).parents[2] / "platform" / "muscale"
NAMING_THE_DECODER = [
    "bundles/bundle.py",  # `Bundle.decoder` and the export to Llama's layout
    "machine/gpu/gpu_checks.py",  # models that the doctor trains
    "settings/config.py",  # [model] without a family
]
MODULES = {"config", "decoder", "decoder_family", "decoder_memory", "decoder_part", "generate", "llama"}
NAMES = {"Decoder", "DecoderFamily", "ModelConfig", "as_decoder"}


def names_the_decoder(source: str) -> bool:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            package = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for imported in (f"{package}{alias.name}" for alias in node.names):
                _, _, inner = imported.partition("proxy_models.architecture.")
                if inner.partition(".")[0] in MODULES or imported.rpartition(".")[2] in NAMES:
                    return True
    return False


def test_three_files_of_the_application_name_the_decoder() -> None:
    found = [path for path in APPLICATION.rglob("*.py") if names_the_decoder(path.read_text())]
    assert sorted(path.relative_to(APPLICATION).as_posix() for path in found) == NAMING_THE_DECODER


def test_an_import_of_any_form_names_the_decoder() -> None:
    for source in (
        "from proxy_models.architecture import llama",
        "from proxy_models import ModelConfig",
        "import proxy_models.architecture.config",
        "def late():\n    from proxy_models.architecture.decoder_part import anything",
    ):
        assert names_the_decoder(source)
    assert not names_the_decoder("from proxy_models.architecture.member import Member")
