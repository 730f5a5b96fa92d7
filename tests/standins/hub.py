"""A hub with as much of its interface as loading and uploading a model need."""

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.standins.server import Handler, serving

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """Repositories by id, each a mapping of paths to contents."""

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)
    address: str = ""
    requests: list[str] = field(default_factory=list)

    def add(self, repo: str, folder: Path) -> None:
        self.repositories[repo] = {
            str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
        }


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub that answers until the end of the block."""
    hub = Hub()

    class Answers(Handler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path).strip("/")
            hub.requests.append(f"{self.command} {path}")
            if path.startswith("api/models/"):
                owner, name, *rest = path.removeprefix("api/models/").split("/")
                files = hub.repositories.get(f"{owner}/{name}")
                if files is None:
                    self.answer(401, b'{"error": "Invalid username or password."}', {"X-Error-Code": "RepoNotFound"})
                elif rest[:1] == ["tree"]:
                    inside = [file for file in sorted(files) if file.startswith("".join(f"{part}/" for part in rest[2:]))]
                    if inside:
                        self.json([self.entry(file, files[file]) for file in inside])
                    else:
                        self.answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
                else:
                    siblings = [{"rfilename": path} for path in sorted(files)]
                    self.json({"id": f"{owner}/{name}", "sha": COMMIT, "siblings": siblings, "tags": [], "private": False})
                return
            owner, name, *rest = path.split("/")
            files = hub.repositories.get(f"{owner}/{name}")
            if files is None:
                self.answer(401, b'{"error": "Invalid username or password."}', {"X-Error-Code": "RepoNotFound"})
            elif (file := "/".join(rest[2:])) not in files:
                self.answer(404, b"Entry not found", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            else:
                digest = hashlib.sha256(files[file]).hexdigest()
                self.answer(200, files[file], {"X-Repo-Commit": COMMIT, "ETag": f'"{digest}"'})

        def do_POST(self) -> None:
            path = unquote(urlsplit(self.path).path).strip("/")
            hub.requests.append(f"POST {path}")
            body = self.body()
            if path == "api/repos/create":
                wanted = json.loads(body)
                repo = f"{wanted['organization']}/{wanted['name']}"
                hub.repositories.setdefault(repo, {})
                if wanted.get("visibility") == "private" or wanted.get("private"):
                    hub.private.add(repo)
                self.json({"url": f"{hub.address}/{repo}", "name": repo})
            elif path == "api/validate-yaml":
                self.json({"errors": [], "warnings": []})
            elif "/preupload/" in path:
                files = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]]
                self.json({"files": files})
            elif "/commit/" in path:
                repo = "/".join(path.split("/")[2:4])
                for line in body.splitlines():
                    entry = json.loads(line)
                    if entry["key"] == "file":
                        hub.repositories[repo][entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
                address = f"{hub.address}/{repo}/commit/{COMMIT}"
                self.json({"success": True, "commitOid": COMMIT, "commitUrl": address, "hookOutput": ""})
            else:
                self.answer(404)

        def json(self, value: object) -> None:
            self.answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        @staticmethod
        def entry(path: str, content: bytes) -> dict[str, object]:
            return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    with serving(Answers) as address:
        hub.address = address
        yield hub
