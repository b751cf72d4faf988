"""Writes stand-ins of the C and C++ libraries that have only the symbols of an older system.

    python tools/old_symbols.py build/wheels/stubs

A library that is linked with `-L build/wheels/stubs` asks the dynamic loader for no symbol version
newer than in the manylinux_2_28 policy, regardless of the system that it is linked on. If a symbol
exists in several versions, the library gets the newest version up to this policy. A symbol that is
newer than the policy is an error of the linker. The stand-ins contain no code, and are used by the
linker only.
"""

import argparse
import pathlib
import re
import subprocess

# The newest versions in the policy (PEP 600, manylinux_2_28: AlmaLinux 8, with GCC 8's libstdc++).
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
# The name that the linker looks for, and the library that is found.
LIBRARIES = {
    "libc.so": "libc.so.6",
    "libm.so": "libm.so.6",
    "libstdc++.so": "libstdc++.so.6",
    "libgcc_s.so.1": "libgcc_s.so.1",
}
# 0000000000099b60 g    DF .text  0000000000000ac6 (GLIBC_2.2.5) pthread_create
_SYMBOL = re.compile(
    r"^[0-9a-f]+ (?P<kind>.{7}) (?P<section>\S+)\s+[0-9a-f]+\s+\(?(?P<version>[A-Z]+_[0-9.]+)\)?\s+"
    r"(?P<name>\S+)$"
)


def path_of(name: str) -> str:
    """The real library, as the compiler finds it."""
    found = subprocess.run(
        ["g++", f"-print-file-name={name}"], check=True, capture_output=True, text=True
    )
    return str(pathlib.Path(found.stdout.strip()).resolve())


def symbols(library: str) -> dict[str, tuple[str, str]]:
    """Returns the newest allowed version of each symbol, and its type."""
    text = subprocess.run(
        ["objdump", "-T", library], check=True, capture_output=True, text=True
    ).stdout
    found: dict[str, tuple[str, str]] = {}
    for line in text.splitlines():
        match = _SYMBOL.match(line)
        if not match or match["section"] in ("*UND*", "*ABS*"):
            continue
        family, numbers = match["version"].split("_")
        key = tuple(map(int, numbers.split(".")))
        if family not in NEWEST or key > NEWEST[family]:
            continue
        name = match["name"]
        if name not in found or key > tuple(map(int, found[name][0].split("_")[1].split("."))):
            kind = "object" if "O" in match["kind"] else "function"
            if match["section"] in (".tbss", ".tdata"):
                kind = "tls_object"
            found[name] = (match["version"], kind)
    return found


def write(folder: pathlib.Path, name: str, soname: str) -> None:
    """Writes one stand-in."""
    found = symbols(path_of(soname))
    lines, versions = [], set()
    for number, (symbol, (version, kind)) in enumerate(sorted(found.items())):
        versions.add(version)
        lines.append('.section .tbss,"awT",@nobits' if kind == "tls_object" else ".data")
        lines.append(f".globl s{number}\n.type s{number}, @{kind}\ns{number}: .zero 8")
        lines.append(f".size s{number}, 8\n.symver s{number}, {symbol}@@{version}, remove")
    assembly = folder / f"{name}.s"
    assembly.write_text("\n".join(lines) + "\n")
    script = folder / f"{name}.map"
    script.write_text("".join(f"{version} {{}};\n" for version in sorted(versions)))
    target = folder / (soname if name == "libc.so" else name)
    command = ["gcc", "-shared", "-nostdlib", f"-Wl,-soname,{soname}"]
    subprocess.run([*command, f"-Wl,--version-script,{script}", "-o", target, assembly], check=True)
    if name == "libc.so":
        # As in the system's own libc.so: the parts that are always linked statically, and the
        # loader, for thread-local data.
        libraries = f"{path_of('libc_nonshared.a')} AS_NEEDED ( {path_of('ld-linux-x86-64.so.2')} )"
        (folder / name).write_text(f"GROUP ( {target.resolve()} {libraries} )\n")
    print(f"{soname}: {len(found)} symbols")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path, help="the folder to write to")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, soname in LIBRARIES.items():
        write(folder, name, soname)


if __name__ == "__main__":
    main()
