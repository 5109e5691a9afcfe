"""The repositories of configs/sources.py in small, laid out as on the Hub."""

import gzip
import json
import random
from pathlib import Path

WORDS = ["the", "of", "energy", "matrix", "naïve", "Größe", "東京", "данные", "theorem", "🙂", "function", "return", "print"]
COPIES = 7      # every so many documents are copies of earlier ones


def make_hub(folder: Path, documents: int = 60) -> dict[str, dict[str, list[dict]]]:
    """Writes the repositories of configs/sources.py as they lie on the Hub, `documents` rows a file, and returns what lies in
    them: repository -> file -> rows. There are copies within and across the sources, empty documents, odd Unicode."""
    from configs.sources import SOURCES

    rng, hub, said = random.Random(3), {}, []

    def text() -> str:
        if said and rng.random() < 1 / COPIES:
            return rng.choice(said)
        kind = rng.random()
        new = " ".join(rng.choices(WORDS, k=rng.randint(5, 300))) if kind > 0.03 else ("" if kind < 0.01 else " \n\t")
        said.append(new + rng.choice(["", "\n", "\r\n", "<|endoftext|>", "\0", "\u2028", "\x85 end"]) if new.strip() else new)
        return said[-1]

    def code(language: str, number: int) -> dict:
        content = text() + ("\ud83d cut in half" if number % 20 == 7 else "")     # JSON can say half a character; parquet cannot
        return {"id": f"{language}{number}", "text": content, "score": 3.2, "int_score": 3, "source": "stackv2", "created": None,
                "metadata": {"language": language, "license": "MIT", "detected_licenses": ["MIT", "ISC"], "is_generated": False,
                             "path": f"/src/{number}", "gha_language": rng.choice(["C", "Python", None])}}

    web, stack, arxiv, github = (SOURCES[name].dataset for name in ("fineweb_edu", "python", "arxiv", "c_github"))
    hub[web] = {f"sample/100BT/{name}.parquet": [
        {"text": text(), "id": f"<urn:{name}:{n}>", "dump": "CC-MAIN-2013-20", "url": "http://a.b/", "file_path": "s3://x",
         "language": "en", "language_score": 0.9, "token_count": 7, "score": 3.1, "int_score": 3} for n in range(documents)]
        for name in ("000_00000", "000_00001", "001_00000", "001_00001")}
    hub[web]["sample/10BT/000_00000.parquet"] = [{"text": "of another sample", "id": "x"}]
    # As there: grouped by language, and a language may begin in mid-file.
    runs = [("Markdown", 1), ("C", 1.5), ("HTML", 0.5), ("Python", 1.5), ("TypeScript", 0.5), ("Zig", 1)]
    rows = [code(language, n) for language, files in runs for n in range(int(files * documents))]
    hub[stack] = {f"stack-edu-{i:04d}.json.gz": rows[i * documents:(i + 1) * documents] for i in range(len(rows) // documents)}
    hub[arxiv] = {f"arxiv-papers-{i:04d}.json.gz": [
        {"id": f"{i}.{n}", "text": text(), "source": "arxiv", "added": "2024-05-01", "metadata": {"license": "CC-BY-4.0"}}
        for n in range(documents // 2)] for i in range(3)}
    hub[github] = {f"data/train-{i:05d}-of-00002.parquet": [
        {"code": text(), "repo_name": "a/b", "path": "c.c", "size": 1, "language": rng.choice(["C", "C++", "Python"]),
         "license": rng.choice(["mit", "gpl-3.0", "isc", "apache-2.0"])} for n in range(documents)] for i in range(2)}
    licenses = {web: "odc-by", stack: "blueoak-1.0.0"}
    for repo, files in hub.items():
        write_repository(folder, repo, files, license=licenses.get(repo))
        revision = next(source.revision for source in SOURCES.values() if source.dataset == repo)
        (folder / repo / ".revision").write_text(revision)
    return hub


def write_repository(folder: Path, repo: str, files: dict[str, list[dict]], license: str | None = None) -> None:
    """Writes rows as the names say: .parquet, .jsonl, .json, each line-based one also as .gz or .zst."""
    for name, rows in files.items():
        path = folder / repo / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet"):
            import pyarrow
            import pyarrow.parquet
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=20)
            continue
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
        if name.endswith(".gz"):
            data = gzip.compress(data, 6, mtime=0)
        elif name.endswith(".zst"):
            import zstandard
            data = zstandard.compress(data)
        path.write_bytes(data)
    (folder / repo / "README.md").write_text((f"---\nlicense: {license}\n---\n" if license else "") + f"# {repo}\n")
