# SPDX-License-Identifier: Apache-2.0
"""Makes the site of the documentation (make docs): the pages of this repository, and what docstrings and headers say.

The repository is the source directory, so that links between pages are those that a reader of the repository follows.
"""

import re
import shutil
from pathlib import Path

from autoapi._objects import PythonObject
from sphinx.application import Sphinx

_ROOT = Path(__file__).resolve().parents[2]

project = "libmla"
author = "the libmla developers"
copyright = author
extensions = ["myst_parser", "autoapi.extension", "sphinx.ext.napoleon", "breathe", "sphinx_copybutton"]
root_doc = "README"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/**"]
exclude_patterns = ["docs/site/contents.md"]

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
suppress_warnings = ["autoapi.python_import_resolution", "duplicate_declaration.cpp"]

autoapi_dirs = [str(_ROOT / "python" / "libmla")]
autoapi_root = "docs/site/python"
autoapi_options = ["members", "show-inheritance", "show-module-summary", "imported-members"]
autoapi_python_class_content = "both"
autoapi_add_toctree_entry = False
autoapi_keep_files = False
# The drop-ins have the interfaces of other libraries, which docs/compatibility.md names.
_UNLISTED = ["_bench", "_text", "integrations", "flash_mla", "flashinfer", "deep_gemm"]
_INTERNAL = ["__main__", "cli", "frameworks", "run_as"]
autoapi_ignore = [f"*/{name}/*" for name in _UNLISTED] + [f"*/{name}.py" for name in _INTERNAL]
autodoc_typehints = "signature"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

breathe_projects = {"libmla": str(_ROOT / "build" / "site" / "doxygen" / "xml")}
breathe_default_project = "libmla"
breathe_domain_by_extension = {"h": "cpp"}

html_theme = "furo"
html_title = "libmla"
html_show_sourcelink = False
html_copy_source = False
html_extra_path = ["index.html"]


def _change_page(app: Sphinx, docname: str, source: list[str]) -> None:
    """Fits a page of the repository to the site."""
    folder, _, name = docname.rpartition("/")

    # Folders, and pages of folders that the site has not, are named and not linked.
    def link(found: re.Match[str]) -> str:
        target = (_ROOT / folder / found["path"]).resolve()
        is_page = target.suffix == ".md" and target.is_file()
        absent = target.is_dir() or (is_page and str(target.relative_to(_ROOT)) not in _pages(app))
        return found["text"] if absent else found[0]

    source[0] = re.sub(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<path>(?!https?:|#)[^)#\s]+)[^)]*\)", link, source[0])
    if docname == root_doc:
        source[0] += (Path(app.confdir) / "contents.md").read_text()
    elif name == "README":  # a list of the folder's pages
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\n[!R]*\n```\n"


def _pages(app: Sphinx) -> set[str]:
    return {f"{name}.md" for name in app.project.docnames}


# Modules that share their name with a function of their package, which has what they offer.
_NAMESAKES = {"libmla.info", "libmla.distributed.combine"}


def _is_skipped(_app: Sphinx, what: str, name: str, _object: object, skip: bool, _options: object) -> bool:
    return skip or (what == "module" and name in _NAMESAKES)


def _first_sentence(self: PythonObject) -> str:
    """Returns the summary of a docstring: autoapi's own is its first line, which may end within the sentence."""
    paragraph = " ".join(self.docstring.strip().partition("\n\n")[0].split())
    return re.match(r"(?:``.*?``|(?!\. ).)*\.?", paragraph)[0]


PythonObject.summary = property(_first_sentence)


def _copy_images(app: Sphinx, error: Exception | None) -> None:
    """Copies what pages show by HTML of their own, for light and for dark screens."""
    for folder in ("docs/img", "docs/kernels/img"):
        if error is None:
            shutil.copytree(_ROOT / folder, Path(app.outdir) / folder, dirs_exist_ok=True)


def setup(app: Sphinx) -> None:
    app.connect("build-finished", _copy_images)
    app.connect("autoapi-skip-member", _is_skipped)
    app.connect("source-read", _change_page)
