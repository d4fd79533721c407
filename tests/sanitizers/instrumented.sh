# What `address` and `thread` share; they source it. Both set `name`, CC, `flags`, and `runtime`, the
# environment that the instrumented extension runs in.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=$work/venv/bin/python
step() { printf '\n== %s: %s\n' "$name" "$*"; }
fail() { printf '%s: %s\n' "$name" "$*" >&2; exit 1; }

# The compiler's own file of this name.
file_of_compiler() {
    local file
    command -v "$CC" >/dev/null || fail "no compiler $CC, which the variable CC names; $hint"
    file=$("$CC" -print-file-name="$1")
    [[ $file == /* ]] || fail "$CC has no $1; $hint"
    echo "$file"
}

# What git knows or would add; outside of its trees all but what is built.
sources() {
    if [[ -e .git ]]; then
        git ls-files -z --cached --others --exclude-standard
    else
        find . -type f -not -path '*/.*' -not -path './build/*' -not -name '_core.c' -not -name '*.so' -print0
    fi
}

# build NAME VALUE: builds a copy of the source, with another value of one of the loops' constants.
build() {
    step "build with $CC $flags"
    mkdir "$work/source"
    sources | tar -c --null -T - | tar -x -C "$work/source"
    cd "$work/source"
    grep -qE "^(cdef .* |    )$1 = " src/tileattn/loops/*.pxi || fail "the loops have no constant $1"
    sed -i -E "s/^((cdef .* |    )$1 = ).*/\1$2/" src/tileattn/loops/*.pxi
    "${PYTHON:-python3}" -m venv "$work/venv"
    CC=$CC CFLAGS="-g $flags" LDFLAGS=$flags "$work/venv/bin/pip" install --quiet '.[test]'
    # shellcheck disable=SC2086
    "$CC" -std=gnu11 -O2 -g -fopenmp -fPIC -shared $flags tests/sanitizers/faults.c -o "$work/faults.so"
}

reports() { cat "$work"/report.* 2>/dev/null || true; }

# Does what tests/sanitizers/faults.c plants, on an array of NumPy.
plant() {
    rm -f "$work"/report.*
    env "${runtime[@]}" "$python" -c '
import ctypes, sys
import numpy as np
memory = np.ones(64, np.float32)
getattr(ctypes.CDLL(sys.argv[1]), sys.argv[2])(ctypes.c_void_p(memory.ctypes.data), memory.size)
' "$work/faults.so" "$1" 2>"$work/report.stderr"
}

# must_report FAULT TEXT
must_report() {
    if plant "$1"; then
        fail "the planted fault $1 was not noticed"
    fi
    grep -q "$2" <<<"$(reports)" || { reports; fail "no report of $1 says '$2'"; }
    echo "$1: reported"
}

must_pass() {
    if ! plant "$1" || [[ -n $(reports) ]]; then
        reports
        fail "$1, which has no fault, was reported"
    fi
    echo "$1: passed"
}

# A report counts even where the test that it comes from passes, or has a process of its own. Beside
# AddressSanitizer gcc's UndefinedBehaviorSanitizer writes to stderr whatever log_path says, before it ends
# the process, so pytest must not keep it.
suite() {
    step "tests"
    rm -f "$work"/report.*
    local status=0
    env "${runtime[@]}" "$python" -m pytest -p no:cacheprovider --capture=sys "$@" || status=$?
    if [[ -n $(reports) ]]; then
        reports | head -n 400
        fail "the sanitizer reports what stands above"
    fi
    return "$status"
}
