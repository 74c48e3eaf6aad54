"""Wrong configs as people write them: file text (or bytes) -> the whole lines that `check`
prints.
"""

from __future__ import annotations

from typing import Final

SECTIONS: Final = ", ".join(
    (
        "run",
        "model",
        "data",
        "task",
        "batch",
        "precision",
        "zero",
        "parallel",
        "optimizer",
        "scheduler",
        "training",
        "evaluation",
        "checkpoint",
        "monitors",
        "callbacks",
        "supervision",
        "profile",
        "deepspeed",
    )
)
NO_KIND: Final = "the section does not say which kind it is; add"
OPTIMIZERS: Final = (
    "adamw, adam, adamw_8bit, schedule_free, sgd, adagrad, lion, lamb, adafactor, muon, or target: "
    "package.module:name"
)
MODELS: Final = (
    "lenet, small_resnet18, resnet18, resnet50, mlp, gpt, bert, or target: package.module:name"
)
DATA: Final = (
    "digits, fashion_mnist, cifar10, image_folder, synthetic_images, text, text_pairs, conversations, labelled_text, "
    "huggingface, mixture, "
    "or target: package.module:name"
)
NAME: Final = "a name is 1 to 100 letters, digits, _, - and ., with no . or - first"
JSON_FIX: Final = "check commas, quotes and brackets; comments and trailing commas need a .yaml file [config-syntax]"
TAG_FIX: Final = "write a plain value; text may stand in quotes [config-syntax]"

YAML: Final[dict[str, tuple[str | bytes, list[str]]]] = {
    # unknown keys
    "misspelt section": (
        "modle: {kind: lenet}",
        [":1: modle = {kind: lenet}: there is no such key; did you mean 'model'? [unknown-key]"],
    ),
    "misspelt key": (
        "training:\n  max_epoch: 3\n",
        [
            ":2: training.max_epoch = 3: there is no such key; did you mean 'max_epochs'? [unknown-key]"
        ],
    ),
    "key of another section": (
        "run: {lr: 0.1}",
        [":1: run.lr = 0.1: there is no such key here; it exists as optimizer.lr [unknown-key]"],
    ),
    "further key of DeepSpeed's ZeRO": (
        "zero: {zero_hpz_partition_size: 2}",
        [
            ":1: zero.zero_hpz_partition_size = 2: there is no such key; write it as "
            "deepspeed.zero_optimization.zero_hpz_partition_size, where DeepSpeed's further keys go [unknown-key]"
        ],
    ),
    "key of another kind": (
        "optimizer: {kind: adamw, momentum: 0.9}",
        [
            ":1: optimizer.momentum = 0.9: there is no such key here; it exists as optimizer.momentum of sgd, muon "
            "[unknown-key]"
        ],
    ),
    "nothing like it": (
        "batch: {foo: [1, 2]}",
        [
            ":1: batch.foo = [1, 2]: there is no such key; known here: global_size, micro_size, accumulation_steps "
            "[unknown-key]"
        ],
    ),
    "keys that are no words": (
        '1.5: {}\n"": 3\n"a\\nb": 1\n"²": 1\n',
        [
            f":{line}: {subject}there is no such key; known here: {SECTIONS} [unknown-key]"
            for line, subject in ((1, "1.5 = {}: "), (2, ""), (3, "a\\nb = 1: "), (4, "² = 1: "))
        ],
    ),
    # wrong types
    "quoted numbers": (
        'batch: {global_size: "120"}\noptimizer: {kind: sgd, lr: "1e-3"}\n',
        [
            ':1: batch.global_size = "120": text where a whole number belongs; write 120 without quotes [wrong-type]',
            ':2: optimizer.lr = "1e-3": text where a number belongs; write 1e-3 without quotes [wrong-type]',
        ],
    ),
    "fraction for a count": (
        "batch: {global_size: 1.5}",
        [
            ":1: batch.global_size = 1.5: a number with a fraction where a whole number belongs; write a whole number "
            "[wrong-type]"
        ],
    ),
    "true for a count": (
        "batch: {global_size: true}",
        [
            ":1: batch.global_size = true: a truth value where a whole number belongs; write a whole number "
            "[wrong-type]"
        ],
    ),
    "yes for true": (
        "monitors: {csv: yes}",
        [":1: monitors.csv = yes: text where true or false belongs; write true [wrong-type]"],
    ),
    "number for text": (
        "run: {name: 7}",
        [':1: run.name = 7: a whole number where text belongs; write "7", in quotes [wrong-type]'],
    ),
    "word for a section": (
        "run: fast\nmodel: lenet\nprecision: bf16\n",
        [
            ":1: run = fast: text where a section of keys belongs; write its keys under it [wrong-type]",
            ":2: model = lenet: text where a section of keys belongs; write {kind: lenet} [wrong-type]",
            ":3: precision = bf16: text where a section of keys belongs; write {dtype: bf16} [wrong-type]",
        ],
    ),
    "place of code and strange word for a section": (
        "model: mine:Net\nprecision: tiny\n",
        [
            ":1: model = mine:Net: text where a section of keys belongs; write {target: mine:Net} [wrong-type]",
            ":2: precision = tiny: text where a section of keys belongs; write {dtype: ...}, one of fp32, fp16, "
            "bf16, autocast [wrong-type]",
        ],
    ),
    "number and list for a section": (
        "zero: 3\noptimizer: [adamw]\ndeepspeed: true\n",
        [
            ":1: zero = 3: a whole number where a section of keys belongs; write {stage: 3} [wrong-type]",
            ":2: optimizer = [adamw]: a list where a section of keys belongs; write its keys under it [wrong-type]",
            ":3: deepspeed = true: a truth value where a section of keys belongs; write its keys under it [wrong-type]",
        ],
    ),
    "sections with nothing under them": (
        "training:\nscheduler:\n",
        [
            f":{line}: {key} = null: nothing where a section of keys belongs; write its keys under it, or leave the "
            "section out"
            " [wrong-type]"
            for line, key in ((1, "training"), (2, "scheduler"))
        ],
    ),
    "list elements": (
        "model: {kind: mlp, hidden_sizes: [3, x, -1]}",
        [
            ":1: model.hidden_sizes.1 = x: text where a whole number belongs; write a whole number [wrong-type]",
            ":1: model.hidden_sizes.2 = -1: too small; write 1 or more [wrong-value]",
        ],
    ),
    "a word or a number": (
        "training:\n  loss_tile: -3\n",
        [":2: training.loss_tile = -3: too small; write 0 or more, or 'auto' [wrong-value]"],
    ),
    "neither the word nor a number": (
        "training:\n  loss_tile: all\n",
        [
            ":2: training.loss_tile = all: text where a whole number belongs; write a whole number, "
            "or 'auto' [wrong-type]",
        ],
    ),
    # kinds
    "no kind": (
        "model: {image_size: 28}\noptimizer: {lr: 0.1}\nprecision: {loss_scale: 3}\nzero: {offload_optimizer: "
        "{pin_memory: true}}",
        [
            f":1: model.kind: {NO_KIND} kind: one of {MODELS} [missing-kind]",
            f":2: optimizer.kind: {NO_KIND} kind: one of {OPTIMIZERS} [missing-kind]",
            f":3: precision.dtype: {NO_KIND} dtype: one of fp32, fp16, bf16, autocast [missing-kind]",
            f":4: zero.offload_optimizer.device: {NO_KIND} device: one of none, cpu, nvme [missing-kind]",
        ],
    ),
    "null kind": (
        "data: {kind: null}",
        [f":1: data.kind: {NO_KIND} kind: one of {DATA} [missing-kind]"],
    ),
    "misspelt kinds": (
        "optimizer: {kind: adamW}\nscheduler: {kind: WarmupLR}\nprecision: {dtype: bfloat16}\n",
        [
            f":1: optimizer.kind = adamW: there is no such kind; did you mean 'adamw'? known: {OPTIMIZERS} "
            "[unknown-kind]",
            ":2: scheduler.kind = WarmupLR: there is no such kind; did you mean 'warmup'? known: constant, cosine, "
            "linear, polynomial, wsd, inverse_sqrt, warmup, warmup_decay, warmup_cosine, one_cycle, lr_range_test, "
            "or target: package.module:name [unknown-kind]",
            ":3: precision.dtype = bfloat16: there is no such kind; did you mean 'bf16'? known: fp32, fp16, bf16, "
            "autocast [unknown-kind]",
        ],
    ),
    "number as kind": (
        "task: {kind: 3}",
        [
            ":1: task.kind = 3: there is no such kind; known: classification, causal_lm, masked_lm, model_loss, "
            "or target: package.module:name [unknown-kind]"
        ],
    ),
    "kind and target": (
        "model: {kind: lenet, target: 'a:b'}",
        [
            ":1: model.kind = lenet: the section names a target as well; keep kind or target, not both [unknown-key]"
        ],
    ),
    "arguments that are a list": (
        "model: {target: 'a:b', args: [1, 2]}",
        [
            ":1: model.args = [1, 2]: a list where a section of keys belongs; write its keys under it [wrong-type]"
        ],
    ),
    "keys that a kind cannot do without": (
        "scheduler: {kind: one_cycle}\ndata: {kind: image_folder}\n",
        [
            ":1: scheduler.min_lr: the key is required here; add it [missing-key]",
            ":1: scheduler.max_lr: the key is required here; add it [missing-key]",
            ":2: data.root: the key is required here; add it [missing-key]",
        ],
    ),
    # values
    "names with other characters": (
        "run: {name: my run/1}",
        [f":1: run.name = my run/1: {NAME}; write for example my-run-1 [wrong-value]"],
    ),
    "name of dots": (
        "run: {name: ..}",
        [f":1: run.name = ..: {NAME}; write for example run [wrong-value]"],
    ),
    "target with a dot": (
        "model: {target: my_pkg.nets.MyNet}\ntask: {target: loss}\n",
        [
            ":1: model.target = my_pkg.nets.MyNet: not an import path; write my_pkg.nets:MyNet [wrong-value]",
            ":2: task.target = loss: not an import path; write package.module:name [wrong-value]",
        ],
    ),
    "out of range": (
        "zero: {stage: 4, allgather_bucket_size: 3}\nrun: {seed: -1}\noptimizer: {kind: adam, eps: 0, betas: [0.9, "
        "1.0]}\n",
        [
            ":1: zero.stage = 4: too large; write 3 or less [wrong-value]",
            ":1: zero.allgather_bucket_size = 3: not a multiple of 2; write a multiple of 2 [wrong-value]",
            ":2: run.seed = -1: too small; write 0 or more [wrong-value]",
            ":3: optimizer.eps = 0: too small; write more than 0 [wrong-value]",
            ":3: optimizer.betas.1 = 1.0: too large; write less than 1 [wrong-value]",
        ],
    ),
    "too many and too few values": (
        "optimizer: {kind: adam, betas: [0.9, 0.9, 0.9]}\n",
        [":1: optimizer.betas = [0.9, 0.9, 0.9]: too many values; write 2 [wrong-value]"],
    ),
    "not one of the choices": (
        "monitors: {progress: bars}",
        [
            ":1: monitors.progress = bars: not one of the choices; write 'auto', 'bar', 'lines' or 'off' [wrong-value]"
        ],
    ),
    "not finite": (
        "optimizer: {kind: sgd, lr: .nan, weight_decay: .inf}",
        [
            ":1: optimizer.lr = nan: not a finite number; write a finite number [wrong-value]",
            ":1: optimizer.weight_decay = inf: not a finite number; write a finite number [wrong-value]",
        ],
    ),
    "thousands of digits": (
        f"run: {{seed: {'9' * 5000}}}",
        [":1: a number of 5000 digits; write a smaller one [wrong-value]"],
    ),
    # rules between keys
    "batch that does not divide": (
        "batch: {global_size: 100, micro_size: 7}",
        [
            ":1: batch.global_size = 100: 100 samples cannot be split over 1 device x micro-batches of 7; "
            "set batch.global_size: 98 or 105 [batch-not-divisible]"
        ],
    ),
    "precision in two places": (
        "precision: {dtype: bf16}\ndeepspeed:\n  fp16: {enabled: true}\n",
        [
            ":3: deepspeed.fp16.enabled = true: precision.dtype decides it; set precision.dtype and remove it here "
            "[section-clash]"
        ],
    ),
    "deepspeed keys": (
        "deepspeed:\n  gradient_cliping: 1.0\n  amp: {enabled: true}\n  comms_logger: {enabled: auto, debug: null}\n"
        '  "²": 1\n',
        [
            ":2: deepspeed.gradient_cliping = 1.0: DeepSpeed reads no such key and would ignore it; "
            "training.clip_grad_norm decides 'gradient_clipping' [unknown-deepspeed-key]",
            ":3: deepspeed.amp = {enabled: true}: DeepSpeed removed it in 0.19.8 and refuses it; use precision "
            "[removed-deepspeed-key]",
            ":5: deepspeed.² = 1: DeepSpeed reads no such key and would ignore it; remove it [unknown-deepspeed-key]",
            ":4: deepspeed.comms_logger.enabled = auto: DeepSpeed drops it and takes its default; write the value, or "
            "remove the key [auto-in-deepspeed]",
            ":4: deepspeed.comms_logger.debug = null: DeepSpeed wants a value or no key; remove the key "
            "[null-in-deepspeed]",
        ],
    ),
    "deepspeed monitors": (
        "deepspeed:\n  wandb: {enabled: true}\n  comet: {enabled: true}\n",
        [
            ":2: deepspeed.wandb = {enabled: true}: monitors.wandb decides it; set monitors.wandb and remove it here "
            "[section-clash]",
            ":3: deepspeed.comet = {enabled: true}: monitors.comet decides it; set monitors.comet and remove it here "
            "[section-clash]",
        ],
    ),
    "sinks": (
        "monitors:\n  wandb: yes\n  comet: {offlin: true}\n  mlflow: 3\n  trackio: {project: null}\n",
        [
            ":2: monitors.wandb = yes: text where true or false belongs; write true [wrong-type]",
            ":3: monitors.comet.offlin = true: there is no such key; did you mean 'offline'? [unknown-key]",
            ":4: monitors.mlflow = 3: a whole number where true or false belongs; write true or false [wrong-type]",
            ":5: monitors.trackio.project = null: nothing where text belongs; write text, or leave the key out "
            "[wrong-type]",
        ],
    ),
    "credentials": (
        "monitors:\n  mlflow: {tracking_uri: 'https://me:pw@host/x'}\n  others:\n"
        "    - {target: 'json:loads', args: {api_key: abc, s: x}}\n",
        [
            ":2: monitors.mlflow.tracking_uri: it holds a password, and would be copied into the run folder; set it in "
            "the environment [credential-in-config]",
            ":3: monitors.others.0.args.api_key: it looks like a credential, and would be copied into the run folder; "
            "read it from the environment in your code [credential-in-config]",
        ],
    ),
    # syntax
    "duplicate key": (
        "run: {name: a}\nbatch: {}\nrun: {name: b}\n",
        [":3: run: the key is already set in line 1; keep one of the two [duplicate-key]"],
    ),
    "tab": (
        "run:\n\tname: x\n",
        [":2: a tab stands where only spaces may; indent with spaces [config-syntax]"],
    ),
    "open bracket": (
        "run: {name: x\nbatch: {}\n",
        [
            ":2: not valid YAML: did not find expected ',' or '}' (in what began in line 1); check indentation, "
            "colons and quotes [config-syntax]"
        ],
    ),
    "two colons": (
        "run: name: x\n",
        [
            ":1: a colon that no key can have here; check the indentation, or quote the text [config-syntax]"
        ],
    ),
    "at sign": (
        "run: @x",
        [":1: this character cannot start a value; put the text in quotes [config-syntax]"],
    ),
    "star": (
        "data: {root: *.png}",
        [":1: a * or & that starts no alias or anchor; put the text in quotes [config-syntax]"],
    ),
    "alias of nothing": (
        "data: {root: *images}",
        [
            ":1: the alias has no anchor; write the value out, or quote a text that starts with * [config-syntax]"
        ],
    ),
    "two documents": (
        "run: {}\n---\nrun: {}\n",
        [
            ":2: a second document starts here (in what began in line 1); keep one document per file [config-syntax]"
        ],
    ),
    "list as key": (
        "? [a, b]\n: 3\n",
        [":1: a key must be a word; write key: value [config-syntax]"],
    ),
    "merge key": (
        "run: &a {name: x}\nbatch:\n  <<: *a\n",
        [":3: merge keys (<<) are not supported; write the keys out [config-syntax]"],
    ),
    "list at the top": (
        "- run\n- model\n",
        [
            ": a run config is a mapping of sections; start with a section such as `run:` [config-syntax]"
        ],
    ),
    "text at the top": (
        "train fast please",
        [
            ": a run config is a mapping of sections; start with a section such as `run:` [config-syntax]"
        ],
    ),
    "python object": (
        "run: {name: !!python/object/apply:os.system ['echo hi']}",
        [f":1: the tag !!python/object/apply:os.system is not allowed; {TAG_FIX}"],
    ),
    "python name": (
        "run: {name: !!python/name:os.system x}",
        [f":1: the tag !!python/name:os.system is not allowed; {TAG_FIX}"],
    ),
    "python mapping": (
        "run: !!python/object:foo.Bar {name: x}",
        [f":1: the tag !!python/object:foo.Bar is not allowed; {TAG_FIX}"],
    ),
    "tags of one's own": (
        "run: {name: !env NAME}",
        [f":1: the tag !env is not allowed; {TAG_FIX}"],
    ),
    # bytes and bounds
    "not UTF-8": (
        b"run: {name: \xff}",
        [": byte 12 is not UTF-8 text; save the file as UTF-8 [config-not-text]"],
    ),
    "zero bytes": (b"run:\x00 3", [": it holds zero bytes; name a text file [config-not-text]"]),
    "two megabytes": (
        "# x\n" * 500_000,
        [": more than 1,000,000 bytes; a config is a few kilobytes of text [config-too-large]"],
    ),
    "alias bomb": (
        "a: &a [x,x,x,x,x,x,x,x,x]\n"
        + "".join(
            f"{new}: &{new} [{','.join(['*' + old] * 9)}]\n"
            for old, new in zip("abcdefgh", "bcdefghi", strict=True)
        ),
        [":1: more than 50,000 values (nested aliases?); make it smaller [config-too-large]"],
    ),
    "many values": (
        "deepspeed: [" + "1," * 300_000 + "]",
        [":1: more than 50,000 values (nested aliases?); make it smaller [config-too-large]"],
    ),
    "alias inside itself": (
        "run: &x {name: *x}",
        [":1: nested more than 50 levels; flatten it [config-too-deep]"],
    ),
    "1000 brackets": (
        "run: " + "[" * 1000 + "]" * 1000,
        [":1: nested more than 50 levels; flatten it [config-too-deep]"],
    ),
    "100,000 brackets": (
        "run: " + "[" * 100_000,
        [":1: nested more than 50 levels; flatten it [config-too-deep]"],
    ),
    "1000 levels of indentation": (
        "".join(" " * level + "a:\n" for level in range(1000)),
        [":51: nested more than 50 levels; flatten it [config-too-deep]"],
    ),
}

JSON: Final[dict[str, tuple[str | bytes, list[str]]]] = {
    "comment": (
        '{\n "run": {}, // mine\n "batch": {}}',
        [f":2: not valid JSON: Expecting property name enclosed in double quotes; {JSON_FIX}"],
    ),
    "trailing comma": (
        '{"run": {"name": "x",}}',
        [f":1: not valid JSON: Expecting property name enclosed in double quotes; {JSON_FIX}"],
    ),
    "single quotes": (
        "{'run': {}}",
        [f":1: not valid JSON: Expecting property name enclosed in double quotes; {JSON_FIX}"],
    ),
    "cut off": ('{"run": ', [f":1: not valid JSON: Expecting value; {JSON_FIX}"]),
    "hexadecimal": (
        '{"run": {"seed": 0x10}}',
        [f":1: not valid JSON: Expecting ',' delimiter; {JSON_FIX}"],
    ),
    "raw tab in a string": (
        '{"run": {"name": "a\tb"}}',
        [f":1: not valid JSON: Invalid control character at; {JSON_FIX}"],
    ),
    "duplicate key": (
        '{"run": {"name": "x"},\n"run": {"name": "y"}}',
        [":2: run: the key is already set in line 1; keep one of the two [duplicate-key]"],
    ),
    "tab indentation": (
        '{\n\t"run": {\n\t\t"name": "x",\n\t\t"seed": -4\n\t}\n}',
        [":4: run.seed = -4: too small; write 0 or more [wrong-value]"],
    ),
    "half of a surrogate pair": (
        '{"run": {"output_dir": "\\ud83d\\ude00 \\ud83d"}}',
        [": half of a UTF-16 pair is no text; write the character itself [config-syntax]"],
    ),
    "NaN": (
        '{"optimizer": {"kind": "sgd", "lr": NaN}}',
        [":1: optimizer.lr = nan: not a finite number; write a finite number [wrong-value]"],
    ),
    "1e999": (
        '{"optimizer": {"kind": "sgd", "lr": 1e999}}',
        [":1: optimizer.lr = inf: not a finite number; write a finite number [wrong-value]"],
    ),
    "thousands of digits": (
        f'{{"run": {{"seed": {"9" * 5000}}}}}',
        [": a number of thousands of digits; write a smaller one [config-syntax]"],
    ),
    "empty": ("", [": the file is empty; write at least {} [config-syntax]"]),
    "list": (
        "[1, 2]",
        [
            ": a run config is a mapping of sections; start with a section such as `run:` [config-syntax]"
        ],
    ),
    "deep": ('{"a":' * 100_000, [": nested more than 50 levels; flatten it [config-too-deep]"]),
    "key of 2,000 characters": (
        '{"run": {}, "' + "k" * 2000 + '": 1}',
        [
            ":1: a layout that cannot be read: did not find expected ',' or '}'; lay it out as `python -m json.tool` "
            "does [config-syntax]"
        ],
    ),
}

OVERRIDES: Final[dict[str, tuple[list[str], list[str]]]] = {
    "section": (
        ["run=3"],
        [
            "run = 3: a whole number where a section of keys belongs; write its keys under it [wrong-type]"
        ],
    ),
    "below a value": (
        ["run.name.x=1"],
        [
            "run.name.x = 1: run.name holds a value, not a section; set run.name itself [override-not-a-section]"
        ],
    ),
    "unknown section": (
        ["modell.kind=mlp"],
        ["modell = {kind: mlp}: there is no such key; did you mean 'model'? [unknown-key]"],
    ),
    "empty": (
        ["run.name="],
        [
            "run.name = null: nothing where text belongs; write text, or leave the key out [wrong-type]"
        ],
    ),
    "open bracket": (
        ["run.name=[a"],
        [f"run.name = [a: {NAME}; write for example a [wrong-value]"],
    ),
    "line break": (
        ["run.output_dir=a\nb", "run.name='a b'"],
        [f"run.name = a b: {NAME}; write for example a-b [wrong-value]"],
    ),
    "section without a kind": (
        ["optimizer={lr: 0.1}"],
        [f"optimizer.kind: {NO_KIND} kind: one of {OPTIMIZERS} [missing-kind]"],
    ),
    "whole section": (
        ["optimizer={kind: sgd, lr: 0.1}", "optimizer.lr=abc"],
        ["optimizer.lr = abc: text where a number belongs; write a number [wrong-type]"],
    ),
    "given twice": (
        ["zero.stage=4", "zero.stage=5"],
        ["zero.stage: it is given twice, as 4 and as 5; give it once [setting-twice]"],
    ),
    "python tag": (
        ["run.name=!!python/name:os.system x"],
        [
            f"run.name = !!python/name:os.system x: {NAME}; write for example python-name-os.system-x [wrong-value]"
        ],
    ),
    "rule": (
        ["batch.global_size=7", "batch.micro_size=2"],
        [
            "batch.global_size = 7: 7 samples cannot be split over 1 device x micro-batches of 2; set "
            "batch.global_size: 6 or 8 "
            "[batch-not-divisible]"
        ],
    ),
}
