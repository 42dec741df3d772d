# Two commands start from nothing: `make demo` and `make test`. Each makes .venv and installs what it needs.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check format bench clean

DEMO := runs/demo/natural runs/demo/pgd-10 runs/demo/yopo-3-5

demo: .venv/demo.stamp  ## train natural, PGD and YOPO on embedded digits, attack all three
	$(BIN)/yopo compare demo --methods natural,pgd-10,yopo-3-5 --out runs/demo --resume
	$(BIN)/yopo eval $(DEMO) --attacks pgd-40,cw --samples 400 --save-examples
	$(BIN)/yopo report $(DEMO) --out runs/demo/report.html

test: .venv/dev.stamp  ## the whole test suite, in two processes of one thread each
	$(BIN)/python -m pytest -n 2 --dist worksteal

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

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/%.stamp: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@touch $@

clean:
	rm -rf .venv runs
