# Two commands start from nothing: `make demo` and `make test`. Each makes .venv and installs what it needs.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test frameworks check format bench docs dist clean

# Where this is set, each of the processes that the tests start would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

DEMO := runs/demo/natural runs/demo/pgd-10 runs/demo/yopo-3-5

demo: .venv/demo.stamp  ## train natural, PGD and YOPO on embedded digits, attack all three
	$(BIN)/yopo compare demo --methods natural,pgd-10,yopo-3-5 --out runs/demo --resume
	$(BIN)/yopo eval $(DEMO) --attacks pgd-40,cw --samples 400 --save-examples --radii
	$(BIN)/yopo report $(DEMO) --out runs/demo/report.html

test: .venv/dev.stamp  ## the whole test suite, in two processes of one thread each
	$(BIN)/python -m pytest -n 2 --dist worksteal --ignore tests/frameworks

frameworks: .venv-frameworks/frameworks.stamp  ## the tests beside other people's packages
	.venv-frameworks/bin/python -m pytest tests/frameworks

check: .venv/dev.stamp  ## lint, format, strict types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/dev.stamp  ## put the code into house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/dev.stamp  ## cost ratios of the methods and of PGD-20 on this machine
	$(BIN)/python -m benchmarks.cost
	$(BIN)/python -m benchmarks.evaluate

docs: .venv-docs/docs.stamp  ## the site, in site/html: tutorials are run, links followed, pages looked at
	rm -rf site
	OMP_NUM_THREADS=1 .venv-docs/bin/sphinx-build -W --keep-going -E -j 2 -q docs site/html
	.venv-docs/bin/python -m tools.site site/html

dist: .venv/package.stamp  ## sdist and wheel in dist; the wheel runs the demo where nothing else is
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python -m tools.dist dist

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/%.stamp: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@touch $@

.venv-docs/docs.stamp: pyproject.toml constraints.txt
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

# timm needs torchvision, which does not import beside torch's CPU build: others must not find it.
# Of robustbench the files of architectures are read, which need nothing else.
.venv-frameworks/frameworks.stamp: pyproject.toml constraints.txt
	test -x .venv-frameworks/bin/python || $(PYTHON) -m venv .venv-frameworks
	.venv-frameworks/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[frameworks]'
	.venv-frameworks/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		--no-deps --upgrade --target .venv-frameworks/timm timm torchvision
	.venv-frameworks/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		--no-deps --upgrade --target .venv-frameworks/robustbench robustbench
	@touch $@

clean:
	rm -rf .venv .venv-docs .venv-frameworks runs site dist
