"""A Hugging Face Hub on a loopback port: as much of it as uploading and loading a kernel repository takes."""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlparse


def git_name(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class LoopbackHub:
    """repos: id -> branch -> path -> bytes. fail: (method, regex of the path) -> what is answered instead: a status, or
    a function of the handler."""

    def __init__(self):
        self.repos, self.fail, self.calls, self.tokens = {}, {}, [], set()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"hub": self}))
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def commit_of(self, repo: str, branch: str) -> str:
        files = self.repos[repo][branch]
        names = "".join(f"{path} {git_name(data)}\n" for path, data in sorted(files.items()))
        return hashlib.sha1(f"{branch}\n{names}".encode()).hexdigest()

    def files(self, repo: str, revision: str) -> dict | None:
        branches = self.repos.get(repo, {})
        return next((f for b, f in branches.items() if revision in (b, self.commit_of(repo, b))), None)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: LoopbackHub

    def log_message(self, *_):
        pass

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def answer(self, value, status=200, **headers):
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for key, text in {"Content-Length": str(len(data)), "Content-Type": "application/json", **headers}.items():
            self.send_header(key.replace("_", "-"), text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def missing(self, code="EntryNotFound"):
        self.answer({"error": code}, 404, X_Error_Code=code, X_Error_Message=code)

    def handle_call(self):
        hub, url = self.hub, urlparse(self.path)
        path, body = unquote(url.path), self.body()
        hub.calls.append((self.command, path))
        hub.tokens.add(self.headers.get("Authorization"))
        for (method, pattern), status in hub.fail.items():
            if method == self.command and re.search(pattern, path):
                return status(self) if callable(status) else self.answer({"error": "told to fail"}, status)
        if path == "/api/repos/create":
            wanted = json.loads(body)
            repo = f"{wanted.get('organization') or 'user'}/{wanted['name']}"
            there = repo in hub.repos
            hub.repos.setdefault(repo, {"main": {}})
            return self.answer({"url": f"{hub.endpoint}/kernels/{repo}"}, 409 if there else 200)
        if path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if found := re.fullmatch(r"/kernels/(\w+/[\w.-]+)/resolve/(\w+)/(.+)", path):
            data = (hub.files(found[1], found[2]) or {}).get(found[3])
            if data is None:
                return self.missing()
            commit = next(hub.commit_of(found[1], b) for b, f in hub.repos[found[1]].items() if f.get(found[3]) == data)
            return self.answer(data, ETag=f'"{git_name(data)}"', X_Repo_Commit=commit)
        if found := re.fullmatch(r"/api/kernels/(\w+/[\w.-]+)/(\w+)(?:/([^/]+))?(?:/(.*))?", path):
            return self.repo_call(*found.groups(), body, "recursive=true" in url.query.lower())
        return self.missing()

    def repo_call(self, repo, what, revision, rest, body, recursive):
        hub = self.hub
        if repo not in hub.repos:
            return self.missing("RepoNotFound")
        branches = hub.repos[repo]
        if what == "refs":
            named = [{"name": b, "ref": f"refs/heads/{b}", "targetCommit": hub.commit_of(repo, b)} for b in branches]
            return self.answer({"branches": named, "tags": [], "converts": []})
        if what == "branch":
            there = revision in branches
            branches.setdefault(revision, dict(branches["main"]))
            return self.answer({}, 409 if there else 200)
        files = hub.files(repo, revision)
        if files is None:
            return self.missing("RevisionNotFound")
        if what == "revision":
            siblings = [{"rfilename": name} for name in files]
            return self.answer({"id": repo, "sha": hub.commit_of(repo, revision), "siblings": siblings})
        if what == "preupload":
            names = [f["path"] for f in json.loads(body)["files"]]
            return self.answer({"files": [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]})
        if what == "commit":
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "deletedFile":
                    del files[line["value"]["path"]]
            commit = hub.commit_of(repo, revision)
            url = f"{hub.endpoint}/kernels/{repo}/commit/{commit}"
            return self.answer({"success": True, "commitOid": commit, "commitUrl": url, "hookOutput": ""})
        if what == "tree":
            return self.answer(list(tree(files, rest, recursive)))
        return self.missing()

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_call


def tree(files, folder, recursive):
    """Entries below a folder, as the Hub lists them."""
    prefix, folders = f"{folder}/" if folder else "", set()
    for path, data in files.items():
        parts = path.removeprefix(prefix).split("/")
        if not path.startswith(prefix):
            continue
        for depth in range(1, len(parts) if recursive else min(len(parts), 2)):
            name = prefix + "/".join(parts[:depth])
            if name not in folders:
                folders.add(name)
                yield {"type": "directory", "oid": "0" * 40, "size": 0, "path": name}
        if recursive or len(parts) == 1:
            yield {"type": "file", "oid": git_name(data), "size": len(data), "path": path}
