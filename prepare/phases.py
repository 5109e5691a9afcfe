"""Take sources through both phases: input files to pieces of tokens, pieces to shards and index.json.

Phase one may be shared by any number of workers, each with files of its own; phase two belongs to whoever finishes
last. Both may be cut off at any moment: pieces and shards appear by rename, and what is there already is kept.
"""

import math
import sys

from prepare import inventory
from prepare.assemble import Assembly
from prepare.job import HASH_STEPS, Job, alone, check_room, check_same, earlier, identity, is_committed, is_complete
from prepare.parts import Parts
from prepare.pool import Pool
from prepare.source import BadFile, Piece, Source
from runtime.cli import UserError
from runtime.progress import ProgressLine
from runtime.shards import read_index, write_index

SLACK = 1.002                   # more than is asked for, at first: a few documents always turn out to be copies


class Unfinished(Exception):
    """Input files could not be read; the sentence names them. What was prepared waits for the next try."""


# ------------------------------------------------------------------------------------------------------------ preparing

def prepare(sources: list[Source], job: Job) -> None:
    """Makes out/<source>/ for each source that is not complete yet; with other workers, a share of it.

    Raises UserError: bad input, or a folder that holds something else. Unfinished: files that could not be read.
    """
    begun = []
    for source in sources:
        with alone(job.out):       # nobody finishes a source or begins one meanwhile
            parts = Parts(job.out / source.name / "parts", identity(source, job), job.token_bytes(source))
            if is_complete(source, job):
                parts.remove()      # of a run that was killed between its index and its end
            else:
                parts.open(source.files(parts.known()))
                parts.forgive()     # here, where nobody makes shards without the files that failed
                begun.append((source, parts))
    if not begun:
        return
    check_room(begun, job)
    with Pool(job.tokenizer.name, job.processes, job.grams) as pool:
        for source, parts in begun:
            if not is_committed(job.out / source.name):    # else its shards are being written
                budget = job.budgets.get(source.name)
                tokenise(source, parts, pool, job, budget and SLACK * budget / (1 - job.val_per_10k / HASH_STEPS))
        for source, parts in begun:
            while (target := assemble(source, parts, pool, job)) is not None:   # it falls short, copies dropped
                if not tokenise(source, parts, pool, job, target):
                    print(f"{source.name}: the rest is with other workers; the last one to finish makes the shards")
                    return
            if not (job.out / source.name / "index.json").exists():
                return              # whoever finishes this one does the others too: copies are dropped in order


def tokenise(source: Source, parts: Parts, pool: Pool, job: Job, target: float | None) -> bool:
    """Phase one: one input file after another until the pieces on disk hold `target` tokens. False: none was taken."""
    expected = source.tokens and source.tokens / max(1, len(parts.files))
    who = f"[{job.worker}/{job.workers}] {source.name}" if job.workers > 1 else source.name
    progress, is_taken = ProgressLine(who, "tokens", not job.is_quiet), False
    while (number := parts.next_file(target, expected, job.worker, job.workers)) is not None:
        is_taken = True
        try:
            _tokenise_file(parts, number, pool, target, progress)
        except BadFile as error:
            parts.fail(number, str(error))
            progress.clear()
            print(f"{who}: {parts.files[number].name} cannot be read: {error}", file=sys.stderr)
        finally:
            progress.clear()
            parts.release(number)
    return is_taken


def _tokenise_file(parts: Parts, number: int, pool: Pool, target: float | None, progress: ProgressLine) -> None:
    writer, is_whole, room, piece = parts.writer(number), True, math.inf, None
    encoded = pool.encode(parts.files[number].read(writer.rows))
    try:
        for batch in encoded:
            writer.add(batch)
            if target is not None and piece != writer.rows:     # a piece later the others are further
                piece, room = writer.rows, target - parts.before(number)
            progress.show(lambda read=batch.read: _how_far(parts, number, read, target))
            if writer.tokens >= room:
                is_whole = False
                break
        writer.close(is_last=is_whole)
    except BaseException:
        writer.abandon()
        raise
    finally:
        encoded.close()


def assemble(source: Source, parts: Parts, pool: Pool, job: Job) -> float | None:
    """Phase two: pieces -> shards and index.json. Returns None, or how many tokens of pieces it takes.

    Leaves it to others while they are at work. Raises Unfinished: a file needed could not be read."""
    folder, budget = job.out / source.name, job.budgets.get(source.name)
    with alone(job.out):
        if (folder / "index.json").exists():        # another worker was quicker
            return None
        if not parts.has_locks and job.worker > 1:
            print(f"{source.name}: without locks in {folder} worker 1 alone makes the shards; when all have ended, run the same "
                  f"command without worker=")
            return None
        if is_committed(folder):
            assembly = Assembly.resume(folder)
            check_same(assembly, folder, job, source)
        else:
            if others := parts.others():
                print(f"{source.name}: other workers have {', '.join(others[:3])}{' and more' * (len(others) > 3)}; the last "
                      f"one to finish makes the shards")
                return None
            pieces, is_exhausted = parts.prefix(job.skip_bad), parts.is_exhausted(job.skip_bad)
            assembly = Assembly(folder, pieces, earlier(source, job), job.val_per_10k, budget)
            assembly.layout()
            if not assembly.is_full and not is_exhausted:
                _raise_failures(source, parts)
                return math.inf if budget is None else _next_target(pieces, assembly)
            _check_splits(source, parts, assembly)
            assembly.commit(_facts(source, parts, assembly, job))
        print(f"{folder}: writing {sum(assembly.tokens.values()):,} tokens", file=sys.stderr)
        write_index(folder, {**assembly.facts, "splits": assembly.write(pool.map)})
        parts.remove()
    dropped = ", ".join(f"{count} in {name}" for name, count in assembly.duplicates.items())
    print(f"{folder}: {sum(assembly.duplicates.values())} documents dropped that came before"
          f"{f' ({dropped})' if set(assembly.duplicates) - {source.name} else ''}, {assembly.empty} empty ones"
          f"{f', {assembly.contaminated} contaminated ones' if job.grams else ''}")
    inventory.print_rows(read_index(folder))
    if budget is not None and not assembly.is_full:
        print(f"{folder}: {assembly.train_tokens:,} training tokens are all there are, {budget:,} were asked for: a run that "
              f"needs more sees some of them again (data.max_epochs)", file=sys.stderr)
    return None


def _next_target(pieces: list[Piece], assembly: Assembly) -> float:
    """How many tokens of pieces should hold the budget, by the share of training tokens in those there are."""
    there = sum(piece.tokens for piece in pieces)
    lacking = (assembly.budget - assembly.train_tokens) * there / max(1, assembly.train_tokens)
    return there + SLACK * lacking + 1


def _facts(source: Source, parts: Parts, assembly: Assembly, job: Job) -> dict:
    """index.json without its splits."""
    read = parts.files[:assembly.last_file + 1] if assembly.is_full else parts.files
    names, failures = [file.name for file in read], parts.failures() if job.skip_bad else {}
    return {"dtype": job.dtype(source), "source": source.name, **job.common,
            "vocab_size": job.tokenizer.vocab_size, "dataset": source.dataset,
            "revision": source.revision, "license": source.license, "selection": source.selection,
            "duplicates": assembly.duplicates, "empty": assembly.empty, "contaminated": assembly.contaminated,
            "files": [name for name in names if name not in failures],
            "skipped": [{"file": name, "reason": failures[name]} for name in names if name in failures],
            "budget": assembly.budget, "is_whole": not assembly.is_full, **({"is_masked": True} if source.is_masked else {})}


def _raise_failures(source: Source, parts: Parts) -> None:
    if failures := parts.failures():
        listed = "".join(f"\n  {name}: {reason}" for name, reason in sorted(failures.items()))
        raise Unfinished(f"{source.name} is not finished: {len(failures)} of {len(parts.files)} input files could not be "
                         f"read; run the same command again to try them again, or add skip_bad=true to leave them out:"
                         f"{listed}")


def _check_splits(source: Source, parts: Parts, assembly: Assembly) -> None:
    documents, total = assembly.documents, sum(assembly.documents.values())
    if not total and (failures := parts.failures()):
        raise Unfinished(f"{source.name} has no documents: {len(failures)} of {len(parts.files)} input files could not be read, "
                         f"{min(failures)} for one: {failures[min(failures)]}")
    if not total:
        dropped = [f"{count} copies of documents in {name}" for name, count in assembly.duplicates.items()]
        dropped += [f"{n} {word} ones" for n, word in ((assembly.empty, "empty"), (assembly.contaminated, "contaminated")) if n]
        raise UserError(f"{source.name} has no documents: {source.dataset} holds " +
                          (f"{', '.join(dropped)} alone; give other files, or another out=" if dropped else "no text"))
    for name, count in documents.items():
        if not count:
            raise UserError(f"none of the {total} documents of {source.name} fell to the {name} split: give more "
                              f"documents, or another share, such as val_share={min(0.5, max(0.01, 5 / total)):.2g}")


def _how_far(parts: Parts, number: int, read: float, target: float | None) -> tuple[int, float]:
    """Tokens of the source on disk, by whomever, and the share of the work done: by tokens, or by bytes of the input files
    as far as this worker knows, 0 where others work too."""
    tokens, files = parts.tokens(), parts.files
    if target is not None and target != math.inf:
        return tokens, min(1.0, tokens / target)
    sizes = [file.bytes or 1 for file in files]
    done = sum(size for size, is_done in zip(sizes, parts.done(), strict=True) if is_done)
    return tokens, (done + read * sizes[number]) / max(1, sum(sizes))


