"""Which definitions of a commit's code a program can come to run.

`Tree(commit).reached(entries)` begins at `file.py` (its `main`) or `file.py:name` and follows names: what a
function, class or constant mentions is reached too. A method or a field is reached when its class is and when
some reached code mentions its name on any object, or has it as a string. That finds more than really runs and
hardly less: names that are put together at run time are not seen, and `tests/benchmarks/test_reach.py` holds
what a training really calls against what is found here. Comments, docstrings and, where nothing reads them,
annotations of functions are no code.
"""

from __future__ import annotations

import ast
import io
import subprocess
import tarfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BODY = "<body>"
"""What a module does when it is imported, apart from defining names."""
Key = tuple[str, str]
"""A file, and a name in it: `function`, `CONSTANT`, `Class` or `Class.member`."""
NOTHING: frozenset[str] = frozenset()
CALLED_BY = {
    **dict.fromkeys(("ABC", "Protocol", "NamedTuple", "Enum", "StrEnum", "IntEnum", "Exception"), NOTHING),
    "Module": frozenset(("forward", "train", "to", "state_dict", "load_state_dict")),
}
"""Which methods of ours the code of a base from elsewhere calls by name; of a base not listed here, all."""


class Module:
    def __init__(self, source: str) -> None:
        self.parts: dict[str, list[ast.AST]] = defaultdict(list)
        self.imports: dict[str, tuple[str, str | None]] = {}
        self.members: dict[str, set[str]] = {}
        self._mentions: dict[str, tuple[set[str], set[tuple[str, str]], set[str]]] = {}
        tree = _without_texts(ast.parse(source))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                self.imports |= {(one.asname or one.name): (one.name, None) for one in node.names}
            elif isinstance(node, ast.ImportFrom):
                self.imports |= {
                    (one.asname or one.name): (node.module or "", one.name) for one in node.names
                }
        for statement in tree.body:
            self._add("", statement)
            if isinstance(statement, ast.ClassDef):
                self.members[statement.name] = set()
                for part in statement.body:
                    self._add(statement.name, part)
                statement.body = []

    def _add(self, owner: str, statement: ast.stmt) -> None:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [statement.name]
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names = [one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            return
        else:
            names = []
        for name in names:
            self.parts[f"{owner}.{name}" if owner else name].append(statement)
            if owner:
                self.members[owner].add(name)
        if not names and not (isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)):
            self.parts[owner or BODY].append(statement)

    def mentions(self, name: str) -> tuple[set[str], set[tuple[str, str]], set[str]]:
        """Names; names behind a path such as `module.name`; and all that may be a member of some class."""
        if name not in self._mentions:
            names, paths, attributes = set(), set(), set()
            for node in (node for part in self.parts.get(name, ()) for node in ast.walk(part)):
                if isinstance(node, ast.Name):
                    names.add(node.id)
                elif isinstance(node, ast.Attribute):
                    attributes.add(node.attr)
                    if _is_path(node.value):
                        paths.add((ast.unparse(node.value), node.attr))
                elif isinstance(node, ast.keyword) and node.arg:
                    attributes.add(node.arg)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    attributes.add(node.value)
            self._mentions[name] = names, paths, attributes
        return self._mentions[name]

    def registered(self) -> list[str]:
        """Functions that an object of this module is given by a decorator: routes, commands."""
        return [
            name
            for name, found in self.parts.items()
            for one in found
            for decorator in getattr(one, "decorator_list", ())
            if any(isinstance(part, ast.Name) and part.id in self.parts for part in ast.walk(decorator))
        ]


@cache
def parsed(source: bytes) -> Module:
    """Most files are the same in most commits."""
    return Module(source.decode())


class Tree:
    def __init__(self, commit: str, root: Path | None = None) -> None:
        command = ["git", "-C", str(root or ROOT), "archive", commit]
        packed = subprocess.run(command, capture_output=True, check=True).stdout
        self.files: dict[str, bytes] = {}
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            for member in archive:
                if member.isfile() and (file := archive.extractfile(member)):
                    self.files[member.name] = file.read()
        self.modules: dict[str, Module] = {}

    def module(self, file: str) -> Module:
        if file not in self.modules:
            self.modules[file] = parsed(self.files[file])
        return self.modules[file]

    def file_of(self, dotted: str) -> str | None:
        path = dotted.replace(".", "/")
        places = (
            f"{folder}{path}{end}"
            for folder in ("src/", "benchmarks/", "")
            for end in (".py", "/__init__.py")
        )
        return next((place for place in places if place in self.files), None)

    def resolve(self, file: str, name: str) -> Key | str | None:
        """The definition that a name in a file stands for, or the file of a module; None for others' code."""
        module = self.module(file)
        if name in module.parts:
            return file, name
        if name not in module.imports:
            return None
        dotted, attribute = module.imports[name]
        if attribute is None:
            return self.file_of(dotted)
        if inner := self.file_of(f"{dotted}.{attribute}"):
            return inner
        outer = self.file_of(dotted)
        return self.resolve(outer, attribute) if outer and outer != file else None

    def reached(self, entries: Sequence[str]) -> dict[Key, str]:
        """Every definition that is reached, with its code."""
        found: set[Key] = set()
        waiting: list[Key] = []
        mentioned: set[str] = set()
        classes: set[Key] = set()

        def reach(key: Key) -> None:
            if key not in found:
                found.add(key)
                waiting.append(key)

        for entry in entries:
            file, _, name = entry.partition(":")
            reach((file, name or "main"))
        while waiting:
            while waiting:
                file, name = key = waiting.pop()
                module = self.module(file)
                if (file, BODY) not in found:
                    for other in (BODY, *module.registered()):
                        reach((file, other))
                if name in module.members:
                    classes.add(key)
                names, paths, attributes = module.mentions(name)
                mentioned |= attributes
                for target in self._targets(file, names, paths):
                    reach(target)
            for file, name in classes:
                called = self._called_from_elsewhere(file, name)
                for member in self.module(file).members[name]:
                    if called is None or member in mentioned | called or member.startswith("__"):
                        reach((file, f"{name}.{member}"))
        return {key: self._code(key) for key in found}

    def _targets(self, file: str, names: Iterable[str], paths: Iterable[tuple[str, str]]) -> Iterator[Key]:
        for name in names:
            target = self.resolve(file, name)
            if isinstance(target, tuple):
                yield target
        for owner, attribute in paths:  # module.name, and package.module.name
            module = self.resolve(file, owner)
            target = self.resolve(module, attribute) if isinstance(module, str) else None
            if isinstance(target, tuple):
                yield target

    def _called_from_elsewhere(self, file: str, name: str) -> frozenset[str] | None:
        """Methods that the code of bases which are not ours may call; None where it might be any."""
        (head,) = (one for one in self.module(file).parts[name] if isinstance(one, ast.ClassDef))
        found = NOTHING
        for base in head.bases:
            text = ast.unparse(base).partition("[")[0]
            own = self.resolve(file, text)
            if isinstance(own, tuple) and own[1] in self.module(own[0]).members:
                more = self._called_from_elsewhere(*own)
            else:
                more = CALLED_BY.get(text.rpartition(".")[2])
            if more is None:
                return None
            found |= more
        return found

    def _code(self, key: Key) -> str:
        file, name = key
        return "\n".join(ast.dump(part) for part in self.module(file).parts.get(name, ()))


def _is_path(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and _is_path(node.value))


def _without_texts(tree: ast.Module) -> ast.Module:
    """Without strings that stand alone, and without annotations of functions, unless a decorator with
    arguments may read them: a route or a command."""
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [one for one in body if not _is_text(one)]  # type: ignore[attr-defined]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if any(isinstance(decorator, ast.Call) for decorator in node.decorator_list):
                continue
            node.returns = None
            for argument in ast.walk(node.args):
                if isinstance(argument, ast.arg):
                    argument.annotation = None
    return tree


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


@cache
def tree(commit: str) -> Tree:
    return Tree(commit)


@cache
def reached(commit: str, programs: tuple[str, ...]) -> dict[Key, str]:
    return tree(commit).reached(programs)


def with_old_names(before: Mapping[Key, str], after: Mapping[Key, str]) -> Mapping[Key, str]:
    """The newer code with its classes called as before: one that is gone from a file and one that came there,
    of the same bases and members. Whether all else is the same, the comparison says."""

    def classes(found: Mapping[Key, str], others: Mapping[Key, str]) -> dict[tuple[str, ...], str]:
        missing = [key for key in found if key not in others and found[key].startswith("ClassDef(")]
        return {
            (file, found[file, name].replace(repr(name), ""), *_members(found, file, name)): name
            for file, name in missing
        }

    gone, came = classes(before, after), classes(after, before)
    for shape in gone.keys() & came.keys():
        old, new = gone[shape], came[shape]
        after = {
            (file, old + name.removeprefix(new) if name.split(".")[0] == new else name): code.replace(
                repr(new), repr(old)
            )
            for (file, name), code in after.items()
        }
    return after


def _members(found: Mapping[Key, str], file: str, owner: str) -> list[str]:
    return sorted(name.removeprefix(owner) for f, name in found if f == file and name.startswith(f"{owner}."))


def changed(before: Mapping[Key, str], after: Mapping[Key, str], paths: Sequence[str]) -> list[str]:
    """Names under these paths whose code is another; where a definition lies, and what a class is called,
    makes no difference."""

    def by_name(found: Mapping[Key, str]) -> dict[str, list[str]]:
        listed: dict[str, list[str]] = defaultdict(list)
        for (file, name), code in sorted(found.items()):
            if code and any(file == path or file.startswith(f"{path}/") for path in paths):
                listed[f"{Path(file).name}:{BODY}" if name == BODY else name].append(code)
        return {name: sorted(codes) for name, codes in listed.items()}

    old, new = by_name(before), by_name(with_old_names(before, after))
    return sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
