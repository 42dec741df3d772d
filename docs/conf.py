"""The site that `make docs` builds from this folder: settings of Sphinx, and formulas as MathML."""

import os
import sys
from pathlib import Path

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # tools: the package itself is installed

import yopo  # noqa: E402
from tools.docstrings import as_rst  # noqa: E402

project = "yopo-torch"
author = "The yopo-torch authors"
copyright = author
release = version = yopo.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
nitpicky = True
# What autodoc finds in signatures and no page here describes: torch's, Python's, and the insides.
nitpick_ignore_regex = [("py:.*", r"(?!yopo\.[A-Za-z0-9]+$).*")]

# ---------------------------------------------------------------- pages

myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3  # as code hosts do
pygments_style = "friendly"

# ---------------------------------------------------------------- tutorials

# Run anew in every build: a cache knows the cells, and nothing of the library that they call.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 600  # a busy machine may need many
nb_execution_in_temp = True
nb_merge_streams = True
os.environ["MATPLOTLIBRC"] = str(Path(__file__).with_name("tutorials"))
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # yopo
os.environ["TTY_COMPATIBLE"] = "0"  # kernels ask rich for colours, and would get bars too

# ---------------------------------------------------------------- the API, from docstrings

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_mock_imports = ["lightning", "transformers"]  # their callbacks need no more than a base
autodoc_default_options = {"exclude-members": "__new__, __init__"}
python_maximum_signature_line_length = 72
python_use_unqualified_type_names = True
add_module_names = False

# ---------------------------------------------------------------- how it looks

html_theme = "furo"
html_title = f"yopo-torch {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_show_copyright = False
html_math_renderer = "mathml"
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#c2410c", "color-brand-content": "#1f6fb5"},
    "dark_css_variables": {"color-brand-primary": "#fb923c", "color-brand-content": "#6cb2f0"},
}


def formula(writer: HTML5Translator, node: nodes.math | nodes.math_block) -> None:
    """As MathML, which browsers draw themselves: no script, and nothing to fetch."""
    block = isinstance(node, nodes.math_block)
    mathml = tex2mathml(node.astext(), as_block=block)
    writer.body.append(f'<div class="formula">{mathml}</div>' if block else mathml)
    raise nodes.SkipNode


def docstring(
    _app: Sphinx, _what: str, _name: str, thing: object, _options: object, lines: list[str]
) -> None:
    """Ours are plain text, to be read in an editor."""
    lines[:] = as_rst(lines, thing)


def setup(app: Sphinx) -> None:
    """Hand over what is above."""
    app.add_html_math_renderer("mathml", (formula, None), (formula, None))
    app.connect("autodoc-process-docstring", docstring)
