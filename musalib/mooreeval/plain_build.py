"""Build one extension with the real `torch.utils.cpp_extension.load_inline`, without loading it.

    python -m musalib.mooreeval.plain_build REQUEST.json OUT_FOLDER

The definition of truth for the tiered build, and the baseline of `benchmarks/build_path.py`. Only the import of the
finished library is left out: candidate code never runs outside the sandbox.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.utils.cpp_extension as cpp_extension


def main() -> None:
    request, folder = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2]
    cpp_extension._import_module_from_library = lambda *args, **kwargs: None
    try:
        cpp_extension.load_inline(
            name="musa_ext", cpp_sources=request["cpp"], functions=request["functions"], extra_cflags=request["cflags"],
            extra_ldflags=request["ldflags"], build_directory=folder, with_pytorch_error_handling=request["error_handling"],
            no_implicit_headers=not request["implicit_headers"],
        )  # fmt: skip
    except RuntimeError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
