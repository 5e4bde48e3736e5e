"""Exceptions from the rules in `test_layering.py` and `test_tests.py`. These tables only shrink."""

from __future__ import annotations

#: Modules that have no test module of their own, by the one that tests them.
TESTED_IN = {
    "bench/test_runner.py": (
        *("bench/environment.py", "bench/observing.py", "bench/outcome.py"),
        "bench/plan_results.py",
    ),
    "bench/tune/test_tuning.py": ("bench/tune/settings.py", "cli/tune.py"),
    "bench/works/test_work.py": (
        *("bench/works/lookup.py", "bench/works/parameters.py", "bench/works/returned.py"),
    ),
    "capture/graphs/test_function.py": (
        *("capture/graphs/capture_settings.py", "capture/graphs/function_capture.py"),
        *("capture/graphs/optimizers.py", "capture/graphs/surroundings.py"),
        *("capture/graphs/work.py", "capture/watching/traced_run.py"),
        "capture/watching/trials.py",
    ),
    "capture/graphs/test_cache.py": ("capture/graphs/captured_work.py",),
    "capture/guards/test_guards.py": ("capture/guards/read_values.py",),
    "capture/models/test_graphed_model.py": (
        *("capture/models/backward_watch.py", "capture/models/captured_model.py"),
        *("capture/models/eager_waits.py", "capture/models/lanes.py"),
        *("capture/models/model_capture.py", "capture/models/model_clones.py"),
        *("capture/models/model_state.py", "capture/models/model_trials.py"),
        *("capture/models/waiting_call.py", "capture/reports/report.py"),
        *("capture/state/gradients.py", "capture/state/held_buffers.py"),
        "capture/state/nested.py",
    ),
    "capture/models/test_outputs.py": ("capture/models/shared_memory.py",),
    "capture/parts/test_speed_up.py": (
        *("capture/parts/accelerated.py", "capture/parts/given_parts.py"),
        *("capture/parts/handle.py", "capture/parts/installed.py", "capture/reports/part.py"),
        *("capture/reports/reasons.py", "capture/reports/speed_up_report.py"),
    ),
    "capture/reading/test_reading.py": (
        *("capture/reading/bytecode.py", "capture/reading/calls.py", "capture/reading/known.py"),
        *("capture/reading/lookup.py", "capture/reading/users_code.py"),
        "capture/reading/walk.py",
    ),
    "capture/reports/test_differences.py": (
        *("capture/models/checked_call.py", "capture/updates/checked_step.py"),
    ),
    "capture/updates/test_graphed_update.py": (
        *("capture/state/learning_rates.py", "capture/updates/captured_update.py"),
        "capture/updates/settling.py",
    ),
    "capture/watching/test_recheck.py": (
        *("capture/reading/contents.py", "capture/reading/places.py"),
    ),
    "cli/test_bench.py": ("bench/text.py", "cli/options.py"),
    "cli/test_program.py": (
        *("cli/doctor.py", "cli/plan.py", "cli/prepare.py", "cli/report.py", "cli/settings.py"),
        "cli/train.py",
    ),
    "data/test_prefetcher.py": (
        *("data/copies.py", "data/loader_state.py", "data/prefetch_pass.py", "data/transfer.py"),
        "data/used_iterators.py",
    ),
    "device/test_base.py": (
        *("device/accelerator.py", "device/determinism.py", "device/graph.py"),
        "device/trace.py",
    ),
    "diagnosis/test_session.py": ("diagnosis/block.py", "replacing.py"),
    "engine/test_engine.py": (
        *("engine/build/model_builder.py", "engine/build/passes.py"),
        *("engine/build/step_builder.py", "engine/build/user_builder.py"),
        *("engine/loader_checks.py", "engine/loop/open_loop.py", "engine/loop/results.py"),
        *("engine/loop/tally.py", "engine/loss/gradients_before.py"),
        *("engine/loss/loss_function.py", "engine/loss/loss_output.py"),
        *("engine/loss/loss_watch.py", "engine/options.py", "engine/plan_in_use.py"),
        *("engine/streams/host_sync.py", "engine/training.py"),
        *("engine/update/accelerate_wrappers.py", "engine/update/clipping.py"),
        *("engine/update/ema.py", "engine/update/nonfinite.py", "engine/update/update.py"),
        "engine/view.py",
    ),
    "engine/update/test_group.py": (
        *("engine/update/group_weight.py", "engine/update/kept_gradients.py"),
    ),
    "engine/graphs/test_step_graphs.py": (
        *("engine/graphs/fixed_gradients.py", "engine/graphs/graph_state.py"),
        *("engine/graphs/step_work.py", "engine/graphs/update_graph.py"),
    ),
    "fake/test_fake_cuda.py": (
        *("fake/cuda/block.py", "fake/cuda/cuda_graph.py", "fake/cuda/device.py"),
        *("fake/cuda/device_names.py", "fake/cuda/legacy.py", "fake/cuda/memory_names.py"),
        *("fake/cuda/namespace.py", "fake/cuda/properties.py", "fake/cuda/random.py"),
        *("fake/cuda/state.py", "fake/cuda/streams.py", "fake/cuda/table.py"),
        *("fake/cuda/tensor_names.py", "fake/cuda/tensors.py", "fake/cuda/tool_names.py"),
        *("fake/orders.py", "fake/program.py", "fake/pytest_plugin.py"),
    ),
    "fake/test_device.py": ("fake/costs.py", "fake/faults.py", "fake/hosts.py"),
    "fake/test_graphs.py": ("fake/branches.py", "fake/tape.py", "fake/tape_entries.py"),
    "fake/test_collectives.py": ("fake/collective_schema.py", "fake/data_parallel.py"),
    "fake/test_memory.py": (
        *("fake/function_mode.py", "fake/mode_call.py", "fake/moves.py", "fake/numpy_views.py"),
        *("fake/raw_memory.py", "fake/unseen_calls.py"),
    ),
    "integrations/test_lightning.py": ("integrations/lightning_values.py",),
    "integrations/test_transformers.py": ("integrations/transformers_values.py",),
    "lifecycle/test_metrics.py": ("lifecycle/tensorboard.py", "lifecycle/usage_log.py"),
    "lifecycle/test_folder.py": ("lifecycle/run_names.py",),
    "machine/test_monitor.py": ("device/sensors.py", "machine/samples.py"),
    "progress/test_progress_line.py": (
        *("progress/line_text.py", "progress/recent_loss.py", "progress/recent_rates.py"),
    ),
    "progress/test_status_line.py": ("progress/display.py", "progress/lenient_file.py"),
    "races/test_checker.py": (
        *("races/actors.py", "races/entries.py", "races/frames.py", "races/history.py"),
        *("races/race.py", "races/storages.py"),
    ),
    "races/test_cuda_programs.py": ("fake/cuda/fixes.py", "races/source.py"),
    "cli/test_races.py": ("races/pages.py", "records/races.py"),
    "cli/test_diagnose.py": ("records/diagnosis.py",),
    "diagnosis/test_comparison.py": ("records/comparison.py",),
    "records/test_bench.py": (
        *("records/environment.py", "records/reading.py", "records/result_file.py"),
        "records/scores.py",
    ),
    "report/test_writing.py": (
        *("report/bench_labels.py", "report/bench_losses.py", "report/bench_tables.py"),
        *("report/bench_times.py", "report/charts.py", "report/environment.py"),
        *("report/lines.py", "report/sensors.py", "report/timelines.py"),
        *("report/train_charts.py", "report/train_page.py", "report/tune_page.py"),
        "text_table.py",
    ),
    "cli/test_run.py": ("records/run.py", "report/run_page.py", "run/settings.py"),
    "run/test_program.py": (
        *("run/batches.py", "run/gain.py", "run/loaders.py", "run/moves.py"),
        *("run/optimizers.py", "run/parts.py", "run/result.py", "run/scripting.py"),
        "run/session.py",
    ),
    "scenarios/faults/test_faults.py": ("engine/step/halving.py", "engine/step/memory_error.py"),
    "scenarios/ranks/test_ranks.py": ("checkpoint/sharded.py", "engine/values/summed.py"),
    "translation/corpus/test_pair_formats.py": (
        *("translation/corpus/pair_json.py", "translation/corpus/pair_tables.py"),
        *("translation/corpus/recognized.py", "translation/corpus/text_files.py"),
    ),
    "translation/corpus/test_packed.py": ("translation/corpus/packing.py",),
    "translation/test_trainer.py": (
        *("translation/built_run.py", "translation/run_corpus.py"),
        *("translation/training_loop.py", "translation/validation.py"),
    ),
    "translation/test_decode.py": ("translation/search.py",),
    "translation/test_model.py": ("translation/model_settings.py",),
    "translation/test_export.py": ("cli/export.py",),
    "engine/graphs/test_graphed_function.py": (
        *("engine/graphs/call_gradients.py", "engine/graphs/function_work.py"),
        "engine/graphs/observed_owners.py",
    ),
    "engine/update/test_schedules.py": ("engine/update/scheduler_kinds.py",),
    "engine/loss/test_carry.py": ("engine/loss/carried_state.py",),
    "engine/step/test_eager.py": (
        *("engine/step/evaluation.py", "engine/step/parts.py", "engine/step/user_step.py"),
    ),
    "engine/loop/test_loop.py": ("engine/loop/parts.py",),
    "engine/state/test_resume.py": ("engine/state/loader_position.py", "engine/state/position.py"),
    "engine/state/test_stored_state.py": ("engine/state/own_share.py", "engine/state/placement.py"),
    "data/test_source.py": (
        *("data/end_flag.py", "data/loader_processes.py", "data/partial_loaders.py"),
        "data/samplers.py",
    ),
    "checkpoint/test_states.py": ("checkpoint/tensor_names.py",),
    "checkpoint/test_writer.py": ("checkpoint/layout.py",),
    "checkpoint/test_folders.py": ("checkpoint/reading.py",),
    "parallel/test_ranks.py": ("parallel/agreement.py",),
    "bench/test_verdict.py": ("bench/recommendation.py",),
    "bench/test_peers.py": ("bench/lightning_peer.py", "bench/peer_trainable.py"),
}

#: Fields that a module sets of objects of Python, PyTorch and other libraries, or of its own
#: storage for each thread.
FIELDS_OF_LIBRARIES = {
    "bench/contestants.py": ("log.propagate",),
    "child_processes.py": ("_main_thread.is_this",),
    "cli/program.py": ("sys.excepthook",),
    "cli/settings.py": ("command.__annotations__", "command.__signature__"),
    "data/end_flag.py": ("self._loader.end_of_dataloader",),
    "data/loader_processes.py": ("loader._iterator",),
    "device/cuda.py": (
        *("cudnn.allow_tf32", "matmul.allow_tf32", "switch.fp32_precision"),
        "graphs._cuda_isCurrentStreamCapturing",
    ),
    "device/determinism.py": ("cudnn.benchmark", "cudnn.deterministic"),
    "device/stream_manager.py": ("self._thread.before",),
    "diagnosis/steps.py": ("finalizers[-1].atexit", "frame.f_trace", "frame.f_trace_lines"),
    "engine/loss/loss_watch.py": ("torch.autograd.backward",),
    "engine/update/nonfinite.py": ("optimizer.found_inf",),
    "engine/update/scheduler_kinds.py": ("wrapper._opt_called",),
    "engine/update/schedules.py": ("self._scheduler.restore_lr",),
    "fake/cuda/table.py": ("copied.__kwdefaults__",),
    "fake/device.py": ("self._thread.modes",),
    "fake/patches.py": ("old.__code__", "old.__new__"),
    "fake/host_threads.py": ("_TracedDeque.__name__", "thread._headrace_ends", "thread.run"),
    "integrations/lightning_values.py": ("one.meta.prog_bar",),
    "integrations/transformers.py": ("config.non_blocking",),
    "integrations/transformers_values.py": (
        *("control.should_log", "self._trainer.state.num_input_tokens_seen"),
        *("state.global_step", "trainer._globalstep_last_logged", "trainer._total_loss_scalar"),
    ),
    "lifecycle/signals.py": ("self._timer.daemon",),
    "main_program.py": (
        *("one.__traceback__", "os._exit", "os.execv", "os.execve", "sys.argv", "sys.excepthook"),
        *("sys.stderr", "sys.stdout", "threading.excepthook"),
    ),
    "parallel/models.py": ("model.require_backward_grad_sync", "module.training"),
    "parallel/ranks.py": ("dist.destroy_process_group",),
    "progress/display.py": ("console.file", "self._bar.bar_width", "sys.stderr", "sys.stdout"),
    "run/session.py": ("log.propagate",),
    "run/when_imported.py": ("loader.exec_module",),
    "schema.py": (
        *("_REPR.maxdict", "_REPR.maxlevel", "_REPR.maxlist", "_REPR.maxlong", "_REPR.maxother"),
        *("_REPR.maxset", "_REPR.maxstring", "_REPR.maxtuple"),
    ),
    "translation/export.py": (
        *("decoder.embeddings.weight", "decoder.projection.bias", "decoder.projection.weight"),
        *("encoder.embeddings[0].weight", "part.beta", "part.bias", "part.gamma", "part.weight"),
        *("side.position_encodings.encodings", "side.scale_embeddings"),
        *("spec.config.add_source_eos", "spec.config.bos_token", "spec.config.eos_token"),
        *("spec.config.decoder_start_token", "spec.config.unk_token"),
    ),
    "translation/model.py": ("self.output.weight",),
}

#: Fields that a module sets of objects of other modules.
FIELDS_OF_OTHERS = {
    "diagnosis/block.py": ("session.seen.is_block",),
    "diagnosis/recorded.py": ("measured.python_lines", "seen.measured", "seen.measured.loader"),
    "diagnosis/script.py": ("self._session.seen.signal",),
    "diagnosis/waits.py": ("in_call.waits",),
    "fake/cuda/device.py": ("self.checker.missing_call",),
    "fake/cuda/device_names.py": ("state.device().sync_debug_mode",),
    "fake/cuda/streams.py": ("made._is_assigned",),
    "fake/device.py": (
        *("actor.time_ns", "host.time_ns", "self.host().time_ns", "self.pinned._lock"),
        *("self.checker.limit_bytes", "self.checker.peak_device_bytes"),
    ),
    "fake/host_threads.py": ("mine.time_ns",),
    "fake/hosts.py": ("host.name", "host.time_ns"),
    "fake/streams.py": ("actor.time_ns",),
    "races/checker.py": ("entry.freed",),
}

#: Classes of which methods set more than eight fields again, and how many.
SET_AGAIN = {
    "diagnosis/steps.py: StepFinder": 10,
    "engine/loop/tally.py: Tally": 9,
}

#: Modules of more than 240 lines.
LONG = {
    *("cli/bench.py", "cli/diagnose.py", "device/base.py", "device/cuda.py", "device/ledger.py"),
    *("diagnosis/breakdown.py", "diagnosis/explanation.py", "diagnosis/forms.py"),
    *("diagnosis/recorded.py", "diagnosis/session.py"),
    *("diagnosis/steps.py", "diagnosis/trace.py", "diagnosis/trace_file.py"),
    *("diagnosis/waits.py", "diagnosis/what_if.py", "fake/autograd.py", "fake/cuda/streams.py"),
    *("fake/device.py", "fake/dispatch_mode.py", "fake/host_threads.py", "fake/tape.py"),
    *("main_program.py", "plan.py", "races/checker.py", "races/operators.py"),
    *("records/bench.py", "schema.py", "translation/settings.py"),
}
