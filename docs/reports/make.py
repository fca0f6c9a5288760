"""Makes the HTML reports of the documentation, and their screenshots.

    python docs/reports/make.py
    python docs/reports/make.py llama --no-screenshots
    python docs/reports/make.py --device cuda --images 16 --no-screenshots
    python docs/reports/make.py --only-screenshots                    # of pages that were made elsewhere

Each report is what `fxfuse.explain(fast).to_html(path, inputs)` writes on this machine. Paths of this machine are cut
to what follows the package folder. Needs transformers; screenshots need Chromium.
"""

from __future__ import annotations

import argparse
import os
import runpy
import shutil
import site
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

import fxfuse

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "headless_shell")
SIZE = "1280,900"
"""Of a screenshot, in pixels."""
CALLS = 4
"""Before a report is written: the third call of a kind runs as a program."""


def resnet50(images: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """ResNet-50 is the default of transformers' ResNet."""
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(num_labels=1000)), (torch.randn(images, 3, 224, 224),)


def llama(images: int) -> tuple[nn.Module, dict[str, object]]:
    """A decoder in Llama's style with two layers and four queries for each key: 32 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2, intermediate_size=688,
        vocab_size=1000,
    )  # fmt: skip
    return LlamaForCausalLM(config), {"input_ids": torch.randint(1000, (1, 32)), "use_cache": False}


def untraced(images: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """One part runs as Python. The model's file is named relative to the repository, as reports then name it, too."""
    return runpy.run_path("docs/reports/untraced.py")["Classifier"](), (torch.randn(images, 3, 64, 64),)


MODELS: dict[str, Callable[[int], tuple[nn.Module, Any]]] = {"resnet50": resnet50, "llama": llama, "untraced": untraced}


def make(name: str, device: str, images: int) -> Path:
    """One report; returns its path."""
    torch.manual_seed(0)
    model, inputs = MODELS[name](images)
    inputs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), inputs)
    fast = fxfuse.optimize(model.eval().to(device), inputs)
    with torch.no_grad():
        for _ in range(CALLS):
            fast(**inputs) if isinstance(inputs, dict) else fast(*inputs)
    page = FOLDER / f"{name}.html"
    fxfuse.explain(fast).to_html(page, inputs)
    text = page.read_text(encoding="utf-8")
    packages = (path for path in sys.path if path.endswith(("site-packages", "dist-packages")))
    for folder in {*site.getsitepackages(), *packages, str(ROOT)}:
        text = text.replace(f"{folder}/", "")
    page.write_text(text, encoding="utf-8")
    return page


def screenshots(page: Path) -> list[Path]:
    """The top of a page in light colours, and what follows its graph in dark ones, by headless Chromium."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        raise SystemExit("screenshots need Chromium (Debian's package is 'chromium'): install it, or --no-screenshots")
    top, rest = page.with_name(f"{page.stem}-graph.png"), page.with_name(f"{page.stem}-timeline.png")
    text = page.read_text(encoding="utf-8")
    for picture, style, light in ((top, "", 1), (rest, "<style>#graph { display: none }</style>", 0)):
        with tempfile.TemporaryDirectory() as folder:
            shown = Path(folder) / "page.html"
            shown.write_text(text.replace("</head>", f"{style}</head>"), encoding="utf-8")
            subprocess.run(
                [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={SIZE}",
                 "--virtual-time-budget=8000", f"--user-data-dir={folder}/profile", f"--screenshot={picture}",
                 f"--blink-settings=preferredColorScheme={light}", "--host-resolver-rules=MAP * ~NOTFOUND",
                 shown.as_uri()],
                check=True, capture_output=True, timeout=120,
            )  # fmt: skip
    return [top, rest]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *MODELS], default=[], help="all of them if none is given")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--images", type=int, default=4, help="for the networks of images")
    parser.add_argument("--no-screenshots", action="store_true")
    parser.add_argument("--only-screenshots", action="store_true")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    for name in arguments.names or MODELS:
        page = FOLDER / f"{name}.html"
        made = [page if arguments.only_screenshots else make(name, arguments.device, arguments.images)]
        if not arguments.no_screenshots:
            made += screenshots(made[0])
        for path in made:
            print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    main()
