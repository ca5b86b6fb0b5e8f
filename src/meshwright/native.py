"""Native functions: the loops that are too slow in Python, as machine code made once on a machine and kept.

A function under :func:`native` is written in Python over flat arrays that its caller allocates. It runs in one of
two ways, equal to the last bit: *plain*, by Python itself, or *compiled*, with the functions under :func:`part` that it
calls. Loading what was compiled takes some hundredths of a second and compiling seconds, so that a process starts plain
and changes when it has run enough to expect more than that: small questions load nothing. Numba compiles, and is
imported for that alone; the machine code lies where Python keeps its own compiled files, and in the user's cache for
other copies of the same code, and llvmlite loads it. Of several processes that need the same one compiles.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import cache_from_source
from pathlib import Path
from threading import Lock
from types import FunctionType
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

#: What an annotation of a parameter means: the element type of an array. Names that begin with Out are written to.
Bytes, Int32s, Int64s, Float64s = NDArray[np.uint8], NDArray[np.int32], NDArray[np.int64], NDArray[np.float64]
OutInt32s, OutInt64s, OutFloat64s = Int32s, Int64s, Float64s

_ARRAYS = {"Bytes": np.uint8, "Int32s": np.int32, "Int64s": np.int64, "Float64s": np.float64}

#: Plain steps of a process, some 0.7 us each, after which it loads what was compiled, and compiles what was not. A
#: prediction takes about 40 for each of its tasks; its first ones tell how many it has.
LOAD_STEPS, COMPILE_STEPS = 15_000, 200_000
#: As COMPILE_STEPS, where what is compiled cannot be kept and the next process has to do it again.
UNKEPT_STEPS = 3_000_000
#: Versions of a function, of as many copies of the code, that the user's cache keeps.
KEPT_VERSIONS = 4
#: So many seconds a process waits for another that compiles the same; then it does so too.
PATIENCE_S = 60.0


class Native:
    """A function that runs plain or compiled. ``steps`` names the parameters whose product says how long it takes."""

    def __init__(self, function: Callable[..., Any], steps: tuple[str, ...]):
        self.function, self.__name__, self.__doc__ = function, function.__name__, function.__doc__
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        self._kinds = tuple(function.__annotations__[name].removeprefix("Out") for name in names)
        self._dtypes = tuple(np.dtype(_ARRAYS[kind]) if kind in _ARRAYS else None for kind in self._kinds)
        self._written = tuple(function.__annotations__[name].startswith("Out") for name in names)
        self._steps = tuple(names.index(name) for name in steps)
        self._returns = function.__annotations__["return"]
        self._call: Callable[..., Any] | None = None
        self._plain_steps = 0
        self._absent, self._version = False, ""

    def __call__(self, *arguments: Any) -> Any:
        if self._call is None and not self._load(arguments):
            return self.plain(*arguments)
        return self.compiled(*arguments)

    def plain(self, *arguments: Any) -> Any:
        """Run in Python, over lists, which it reads faster than arrays."""
        lists = [a.tolist() if kind in _ARRAYS else a for kind, a in zip(self._kinds, arguments)]
        answer = self.function(*lists)
        for written, array, values in zip(self._written, arguments, lists):
            if written:
                array[:] = values
        return answer

    def compiled(self, *arguments: Any) -> Any:
        """Run the machine code, made or loaded where it is not yet."""
        if self._call is None:
            with _lock:
                self._link(self._kept() or self._made())
        return self._call(*[a if d is None else _address(a, d) for a, d in zip(arguments, self._dtypes)])

    def _load(self, arguments: tuple) -> bool:
        """Whether what is compiled is there, or worth its while by now."""
        steps = 1
        for place in self._steps:
            steps *= max(int(arguments[place]), 1)
        with _lock:
            if self._call is None and _Process.steps + steps >= LOAD_STEPS:
                worth = COMPILE_STEPS if self._keepable() else UNKEPT_STEPS
                self._linked(make=_Process.steps + steps >= worth)
            if self._call is None:
                _Process.steps += steps
                self._plain_steps += steps
                _Process.plain[self.symbol] = self
            return self._call is not None

    def _linked(self, *, make: bool) -> None:
        """Load what is kept; where there is nothing and it is time to, compile this and all that ran plain for long.
        Where llvmlite or numba cannot be loaded everything stays plain."""
        try:
            code = None if self._absent and not make else self._kept()  # another process may have compiled it by now
            self._absent = code is None
            if code is None and make:
                code = self._made()
                for other in _Process.plain.values():
                    if other._call is None and other is not self and other._plain_steps >= LOAD_STEPS // 4:
                        other._link(other._kept() or other._made())
            if code is not None:
                self._link(code)
        except (ImportError, OSError):
            _Process.steps = -sys.maxsize

    def _kept(self) -> bytes | None:
        """The machine code that this or another process keeps; None where there is none for this code and machine."""
        for file in self._files():
            try:
                held = file.read_bytes() if _trusted(file) else b""
            except OSError:
                continue
            code = held[64:]
            if held[:32] == self._identity() and held[32:64] == hashlib.sha256(code).digest():
                return code
        return None

    def _files(self) -> list[Path]:
        """Where machine code is kept: with Python's own compiled files, and in the user's cache by what it is of."""
        module = sys.modules[self.function.__module__]
        name = f"{module.__name__.rpartition('.')[2]}.{self.__name__}-{_machine()[1]}"
        self._version = self._version or self._identity().hex()[:12]
        found = [Path(cache_from_source(module.__file__)).parent / f"{name}.native"]
        try:
            user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
            found.append(user / "meshwright" / "native" / f"{name}-{self._version}.native")
        except RuntimeError:  # a user without a home
            pass
        return found

    def _keepable(self) -> bool:
        """Whether what is compiled now can be there for the next process."""
        for file in self._files():
            with suppress(OSError):  # a folder above that this user may not look into
                if os.access(next(p for p in file.parents if p.is_dir()), os.W_OK):
                    return True
        return False

    def _identity(self) -> bytes:
        """A digest of all that the machine code follows from."""
        return hashlib.sha256(repr((_written_as(self.function), _machine()[0])).encode()).digest()

    def _made(self) -> bytes:
        """Compile, and keep the result where that is possible; or what another process compiled meanwhile."""
        with _alone(self._files()[-1]):
            return self._kept() or self._compiled_anew()

    def _compiled_anew(self) -> bytes:
        from meshwright.atomic import write_bytes
        from meshwright.errors import MeshwrightError

        code = _compiled(self)
        whole = self._identity() + hashlib.sha256(code).digest() + code
        files = self._files()
        for file in files:
            with suppress(OSError, MeshwrightError):  # where none can be written the next process compiles it again
                file.parent.mkdir(parents=True, exist_ok=True)
                write_bytes(file, whole, mode=0o644)  # as _trusted wants it, whatever the process's mask allows
        for file in files[1:]:
            _forget_old(file)
        return code

    def _link(self, code: bytes) -> None:
        import llvmlite.binding as llvm

        engine = _engine()
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        types = {"int": ctypes.c_int64, "float": ctypes.c_double, "None": None}
        arguments = [ctypes.c_void_p if kind in _ARRAYS else types[kind] for kind in self._kinds]
        prototype = ctypes.CFUNCTYPE(types[self._returns], *arguments)
        self._call = prototype(engine.get_function_address(self.symbol))

    @property
    def symbol(self) -> str:
        """The name of the function in its machine code."""
        return f"{self.function.__module__}.{self.__name__}"


def native(*steps: str) -> Callable[[Callable[..., Any]], Native]:
    """Decorate a function that runs plain or compiled; `steps`: its parameters whose product says how long it takes.

    Parameters are annotated ``int``, ``float``, or as arrays by the names above; it returns ``int``, ``float`` or None.
    Arrays are flat and contiguous, indices not negative, integers no wider than 64 bits, and nothing is allocated: what
    is written was given.
    """
    return lambda function: Native(function, steps)


def part(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function that native functions call, which is compiled with them; it may return several numbers."""
    function.native_part = True
    return function


class _Process:
    """Plain steps so far and what took them, and what loads machine code once something did."""

    steps = 0
    plain: ClassVar[dict[str, Native]] = {}
    engine: Any = None
    machine: tuple[str, str] | None = None


_lock = Lock()


def _address(argument: np.ndarray, dtype: np.dtype) -> int:
    """The address of an array of that element type."""
    kept = argument.dtype
    if not ((kept is dtype or kept == dtype) and argument.flags.c_contiguous):
        kind = next(name for name, one in _ARRAYS.items() if dtype == one)
        raise TypeError(f"a native function takes contiguous {kind}, this is {kept} {argument.strides}")
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(argument))
    except (TypeError, ValueError):  # read-only or empty: as well, and slower
        return argument.ctypes.data


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Let one process at a time make a file, as far as the system and its folder allow; no longer than a while."""
    lock = None
    with suppress(ImportError, OSError):
        from fcntl import LOCK_EX, LOCK_NB, flock

        file.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(file.with_suffix(".lock"), os.O_CREAT | os.O_RDWR, 0o600)
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            with suppress(BlockingIOError):
                flock(lock, LOCK_EX | LOCK_NB)
                break
            time.sleep(0.05)
    try:
        yield
    finally:
        if lock is not None:
            with suppress(OSError):
                file.with_suffix(".lock").unlink()
            os.close(lock)


def _forget_old(file: Path) -> None:
    """Remove what is kept of older versions of a file's function for this machine."""
    with suppress(OSError):
        same = file.parent.glob(f"{file.stem.rpartition('-')[0]}-*.native")
        for old in sorted(same, key=lambda one: one.stat().st_mtime)[:-KEPT_VERSIONS]:
            old.unlink()


def _trusted(file: Path) -> bool:
    """Whether nobody but this user and the system's can have written a file."""
    if not hasattr(os, "geteuid"):
        return True
    about = file.stat()
    return about.st_uid in (0, os.geteuid()) and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _machine() -> tuple[str, str]:
    """Processor and versions that machine code is for, and a short name for them."""
    if _Process.machine is None:
        import llvmlite
        import llvmlite.binding as llvm

        features = llvm.get_host_cpu_features().flatten()
        said = f"{sys.version_info[:2]} {llvmlite.__version__} {llvm.get_host_cpu_name()} {features}"
        _Process.machine = said, hashlib.sha256(said.encode()).hexdigest()[:12]
    return _Process.machine


def _written_as(function: Callable[..., Any]) -> tuple:
    """Code, constants and annotations of a function, and the same of its parts."""
    code, known = function.__code__, function.__globals__
    named = tuple((name, known[name]) for name in code.co_names if isinstance(known.get(name), int | float))
    parts = tuple((name, _written_as(one)) for name, one in _parts(function).items())
    own = code.co_code.hex(), code.co_consts[1:], code.co_varnames, tuple(function.__annotations__.items()), named
    return (*own, parts) if parts else own


def _parts(function: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """The parts that a function calls, by the names that it calls them by."""
    known = function.__globals__
    return {name: known[name] for name in function.__code__.co_names if hasattr(known.get(name), "native_part")}


def _jitted(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as numba compiles it: what it calls is compiled as well."""
    from numba import njit

    parts = {name: njit(error_model="numpy")(_jitted(one)) for name, one in _parts(function).items()}
    return FunctionType(function.__code__, {**function.__globals__, **parts}, function.__name__) if parts else function


def _compiled(asked: Native) -> bytes:
    """An object file with the function, under its symbol, that refers to nothing outside of itself."""
    import llvmlite.binding as llvm
    from numba import cfunc, types

    _announce()
    scalar = {"int": types.int64, "float": types.float64, "None": types.void}
    array = {kind: types.CPointer(getattr(types, np.dtype(dtype).name)) for kind, dtype in _ARRAYS.items()}
    signature = scalar[asked._returns](*((array | scalar)[kind] for kind in asked._kinds))
    made = cfunc(signature, error_model="numpy", forceinline=True)(_jitted(asked.function))
    module = llvm.parse_assembly(made.inspect_llvm())
    for function in module.functions:
        if function.name == made.native_name:
            function.name = asked.symbol
        elif not function.is_declaration:
            function.linkage = "internal"
    target = _target()
    # once more, now that the function has one caller for sure: what handles errors, which it has none of, goes
    builder = llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(module, builder)
    outside = [f.name for f in module.functions if f.is_declaration and not f.name.startswith("llvm.")]
    if outside:
        raise TypeError(f"{asked.symbol} is not a native function: it needs {', '.join(outside)}")
    return target.emit_object(module)


_announced: list[bool] = []


def _announce() -> None:
    """Say on a terminal, once, why this run takes longer than the next."""
    if not _announced and sys.stderr is not None and sys.stderr.isatty():
        print("compiling for this processor, which is done once ...", file=sys.stderr)
    _announced.append(True)


def _target() -> Any:
    """Machine code for this processor, as fast as it can be. It is not position-independent, as what loads it mixes up
    the tables of several objects that are."""
    import llvmlite.binding as llvm

    _engine()
    cpu, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    found = llvm.Target.from_default_triple()
    return found.create_target_machine(cpu=cpu, features=features, opt=3, codemodel="jitdefault")


def _engine() -> Any:
    """The execution engine that holds the machine code of this process, made once."""
    if _Process.engine is None:
        import llvmlite.binding as llvm

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        target = llvm.Target.from_default_triple().create_target_machine()
        _Process.engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target)
    return _Process.engine
