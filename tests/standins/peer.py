"""A peers' worker without any peer: a script that answers by the protocol of `peers_worker`, and can fail in each way."""

import json
import os
import sys


def answer(do: str, what: dict) -> dict:
    if do == "start":
        return {"versions": {"python": "3", "kvpress": "0"}, "files": sorted(os.listdir(what["base"]))}
    if do == "echo":
        return what
    if do == "fail":
        raise ValueError("first line\nthe last line")
    if do == "die":
        sys.exit("Traceback ...\nRuntimeError: out of memory")
    if do == "babble":
        print("not JSON", flush=True)
        return {}
    if do == "read" and "before" in what:
        return {"states": [k - 0.5 for k in what["states"]], "bytes": [100 * k for k in what["states"]], "held": 7}
    if do == "forget_peak":
        return {}
    if do == "peak":
        return {"bytes": 12345}
    if do == "read":
        return {"texts": [text[:k] for text, k in zip(what["documents"], what["states"], strict=True)]}
    return {"texts": [f"{what['held']}: {len(prompt)}" for prompt in what["prompts"]]}


if __name__ == "__main__":
    for line in sys.stdin:
        request = json.loads(line)
        try:
            made = answer(request.pop("do"), request)
        except Exception as error:
            made = {"error": f"{type(error).__name__}: {str(error).splitlines()[-1]}"}
        print(json.dumps(made), flush=True)
