"""Reads a saved index of any kind.

A saved index is a folder with the files of the index and a manifest, which lists their sizes and checksums.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recshard_lab.arguments import checks_arguments, shown
from recshard_lab.serving.retrieval.exact import ExactIndex
from recshard_lab.serving.retrieval.faiss_index import FaissIndex, FaissMissingError, load_faiss
from recshard_lab.serving.retrieval.index import FORMAT, CandidateIndex, IndexFolderError


@checks_arguments
def load_index(path: str | Path, memory_map: bool = False) -> CandidateIndex:
    """The index that `CandidateIndex.save` wrote.

    Args:
        path: the folder.
        memory_map: leaves the vectors in the file and reads the pages that a search needs. Only file sizes are
            checked then, no checksums. A FAISS index is read-only then: items can be removed, not added.

    Raises:
        IndexFolderError: the folder is missing, incomplete, damaged or of another version.
        FaissMissingError: a FAISS index, and FAISS is not installed.
    """
    folder = FORMAT.readable(path)
    manifest = FORMAT.manifest_of(folder)
    files = manifest["files"]
    checked = len(files) if memory_map else 0  # `check_files` hashes the files from this one on
    FORMAT.check_files(folder, files, checked, checked + 1)
    return read_index(folder, manifest.get("index"), memory_map)


def read_index(folder: Path, content: Any, memory_map: bool) -> CandidateIndex:
    """The index that `CandidateIndex.write` wrote.

    Raises:
        IndexFolderError: the content does not describe an index.
    """
    readers: dict[str, Any] = {"exact": ExactIndex.read, "faiss": FaissIndex.read}
    try:
        kind = content["kind"]
        if kind not in readers:
            raise IndexFolderError(
                f"{folder} has an index of kind {shown(kind)}. Supported: {', '.join(readers)}. Fix: build the index "
                f"again from its vectors"
            )
        if kind == "faiss":
            load_faiss()
        index: CandidateIndex = readers[kind](folder, content, memory_map)
        return index
    except (IndexFolderError, FaissMissingError):
        raise
    except (LookupError, TypeError, ValueError, AttributeError, OSError, RuntimeError) as error:
        raise IndexFolderError(f"{folder} is not a readable saved index: {error}") from error
