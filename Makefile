# make serve                      install, fetch the default model, start everything
# make serve ARGS='--port 9000'   the same with options of `saltern serve`
# make serve TORCH_INDEX=<url>    let pip find torch there too (a build without CUDA is a tenth of the size)
# make test                       everything CI checks; needs PostgreSQL's server binaries
# make test POSTGRES=no           without the tests that need them
#
# Nothing is installed twice: the stamps in .venv are newer than what they were made from.

PYTHON ?= python3
TORCH_INDEX ?=
ARGS ?=
POSTGRES ?= yes

BIN := .venv/bin
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt \
	$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
heading = @printf '\n== %s\n' "$(1)"

.PHONY: serve test
.DELETE_ON_ERROR:

serve: .venv/installed
	$(BIN)/saltern serve $(ARGS)

test: export OMP_NUM_THREADS = 1
test: .venv/installed-test
	$(call heading,default model)
	@$(BIN)/python -c 'from cachestore import default_model; print(default_model.ensure())'
	$(call heading,ruff: lint)
	@$(BIN)/ruff check .
	$(call heading,mypy: types)
	@$(BIN)/mypy
	$(call heading,import-linter: who may import whom)
	@$(BIN)/lint-imports --no-logo
	$(call heading,pytest: tests)
	@$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --durations=10 --postgres=$(POSTGRES)

.venv/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo \
	"$(PYTHON) is missing or older than Python 3.11: install a newer one and name it, make serve PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo \
	"$(PYTHON) lacks its venv module: install it (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv .venv

.venv/installed: .venv/pyvenv.cfg pyproject.toml constraints.txt
	$(INSTALL) --editable .
	@touch $@

.venv/installed-test: .venv/pyvenv.cfg pyproject.toml constraints.txt
	$(INSTALL) --editable '.[test]'
	@touch .venv/installed $@
