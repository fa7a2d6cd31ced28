"""Messages whose remedy another test performs, and those whose remedy no test can have."""

BY_HAND = "tests/remedies/test_by_hand.py"
CHECK = "tests/losses/test_check.py"
COMPARE = "tests/launch/test_compare.py"
ENCODE = "tests/retrieval/test_file_encoder.py"
FAULTS = "tests/retrieval/test_index_faults.py"
INIT = "tests/launch/test_init.py"
PARQUET = "tests/sources/test_parquet.py::test_a_data_set_on_the_hub"
REPRODUCE = "tests/launch/test_reproduce.py"
SEARCH = f"{COMPARE}::test_a_search_writes_experiments_that_score_the_tests"
SAME = f"{ENCODE}::test_the_model_and_the_data_are_those_of_the_index"
ANY = "tests/retrieval/test_any_encoder.py"
AMEND = "tests/data/test_amend.py"
DECIDE = "tests/serve/test_decide.py"
AUDIT = "tests/audit/test_report.py"
SOME = "tests/retrieval/test_some_views.py"
ODD = "tests/sources/test_odd_tables.py"
VERB = "tests/launch/test_pretrain_verb.py"

# By a fragment that the message and the test both have.
PERFORMED = {
    "has changed since the study in ": "tests/studies/test_ledger.py::"
    "test_a_base_that_changed_since_the_study_began_is_refused",
    " already has files; choose another --out": (
        "tests/retrieval/test_locations.py::test_other_settings_and_files_of_others_are_refused"
    ),
    "has no labelled rows; remove --labelled and --valid": f"{INIT}::"
    "test_without_a_test_split_some_rows_are_left_for_it",
    "; change or remove it": f"{INIT}::test_a_number_of_labels_that_cannot_be",
    "must be left to train on; lower it": f"{INIT}::test_a_number_of_labels_that_cannot_be",
    "for views of kind ": "tests/launch/test_backbone.py::"
    "test_a_backbone_of_another_kind_is_refused",
    "but a page of files can have at most ": "tests/serve/test_static_site.py::test_the_verb",
    "cannot be called with ": f"{CHECK}::test_how_a_loss_is_called_is_guessed",
    "a check takes 2 to ": f"{CHECK}::test_every_number_of_processes_has_rows_for_each",
    "say how by --inputs (": f"{CHECK}::test_how_a_loss_is_called_is_guessed",
    "--compare needs two or more runs": "tests/launch/test_runs.py::test_compared",
    "starts one process, but ": f"{VERB}::test_more_processes_than_a_configuration_starts",
    "accelerate cannot read ": f"{VERB}::test_what_cannot_be_started_is_named",
    "so there are no folds; index": f"{COMPARE}::test_a_stream_of_tars_is_indexed_first",
    " more --memory, or --kind ivfpq": "tests/retrieval/test_index_plan.py::"
    "test_what_cannot_be_is_refused",
    " Parquet files ": PARQUET,
    "names no commit, which keeps": PARQUET,
    "check the name and the netw": PARQUET,
    "; make the bucket or folder ": "tests/shards/test_remote_build.py::"
    "test_what_cannot_be_put_says_why",
    "--overwrite moves a folder aside, which object stores can": "tests/shards/"
    "test_remote_build.py::test_the_verb",
    "files cannot be put by HTTP": "tests/shards/test_remote_build.py::test_the_verb",
    "the processes that worked on it were lost": "tests/shards/test_on_cluster.py::"
    "test_an_item_that_kills_every_worker_is_named",
    "but embedding in tasks needs only one": "tests/retrieval/test_embed_tasks.py::"
    "test_what_tasks_refuse",
    "no Ray cluster answers at": "tests/studies/test_on_ray.py::test_a_study_here",
    "in the index; pass the shards that": SAME,
    "has the fingerprint ": SAME,
    " has weights of sha256 ": SAME,
    "has other labels than": f"{AUDIT}::test_shards_of_other_samples_are_refused",
    "has other samples than": f"{AUDIT}::test_shards_of_other_samples_are_refused",
    "an audit by --encoder needs": f"{AUDIT}::test_either_embeddings_or_an_encoder",
    "' twice; remove one": f"{AUDIT}::test_groups",
    "no group of ": f"{AUDIT}::test_groups",
    "is behind a URL; to read it": f"{DECIDE}::"
    "test_pictures_that_are_not_there_are_said_and_none_is_fetched",
    "an audit is served alone": f"{DECIDE}::test_the_verb",
    "--out is the data set itself": f"{AMEND}::test_the_data_set_itself_is_never_written",
    "decides on nothing: no line": f"{AMEND}::test_decisions_that_do_not_fit",
    " neighbours of ": "tests/negatives/test_neighbours.py::test_an_index_that_gives_too_few",
    "files with the other views; pass": f"{SOME}::test_the_command_says_what_it_compares",
    "the index compares whole vectors": f"{SOME}::test_negatives_of_a_view_that_is_not_there",
    "and no other view is given; pass a f": f"{SOME}::test_a_data_set_without_two_views_of_six",
    "pass either a folder of emb": f"{ANY}::test_a_folder_of_transformers",
    "--encoder needs --data, takes": f"{ANY}::test_a_folder_of_transformers",
    "needs a view of kind ": f"{ANY}::test_a_folder_of_transformers",
    "with the samples' other views, because": f"{SOME}::"
    "test_unknown_views_and_none_are_refused_in_a_line",
    "a text is compared": "tests/data/test_texts.py::test_a_text_finds_pictures",
    "which could send your credentials elsewhere": "tests/retrieval/test_foreign.py::"
    "test_options_of_a_run_that_an_index_names_lead_nowhere",
    "the validation rows have no score '": SEARCH,
    "was chosen by ": SEARCH,
    "has results of another experiment, data set or search": f"{COMPARE}::"
    "test_a_comparison_goes_on_where_it_was_stopped",
    "has no map; build it again": f"{BY_HAND}::test_an_index_without_a_map_is_built_again",
    " what is bad with `--on-error skip`": "tests/sources/test_odd_pictures.py::"
    "test_all_bad_files_are_named_at_once_and_may_be_left_out",
    "and so no classes; use --label ": f"{ODD}::test_as_pandas_reads_it",
    "two columns make a view ": f"{ODD}::test_two_columns_of_one_view_are_told_apart",
    "folder of the pictures with --folder": f"{ODD}::test_pictures_elsewhere_are_asked_for",
    "what is above the table, or see": f"{ODD}::test_a_title_above_the_table",
    "has zero bytes": f"{ODD}::test_as_pandas_reads_it",
    "a single one is read with": f"{ODD}::test_as_pandas_reads_it",
    " has a decimal comma or one of thousands": "tests/sources/test_dialects.py::"
    "test_thousands_and_decimal_commas_are_asked_for",
    "; use fewer workers, run the small ": "tests/studies/test_study.py::"
    "test_what_can_never_be_met_is_refused_with_both_numbers",
    "unpack it with tar --ignore-zeros, and pack it again": f"{BY_HAND}::"
    "test_two_tars_one_after_the_other_are_packed_again",
    "has no view of pictures with 1 or 3 channels, which": f"{ENCODE}::test_a_sheet_needs_pictures",
    ", so it is not a model that Heron": "tests/api/test_travel.py::test_a_model_goes_by_the_hub",
    " has a run of another configuration": f"{REPRODUCE}::"
    "test_a_run_of_another_configuration_is_told_of_before_any_runs",
    ": this is set for each run": f"{REPRODUCE}::test_an_override_of_what_one_method_sets_itself",
    "scheduler now decides otherwise for trial": "tests/studies/test_halving.py::"
    "test_rays_schedulers_go_on_from_what_they_decided",
    "belongs to another search ": "tests/studies/test_suggestions.py::"
    "test_a_journal_belongs_to_one_search",
    "has no small version; remove --small": "tests/studies/test_study.py::"
    "test_no_study_and_no_small_version",
    " has another study: ": "tests/studies/test_ledger.py::test_a_folder_holds_one_study",
    "and --overwrite would move ": f"{BY_HAND}::"
    "test_a_folder_of_a_run_that_is_being_trained_is_moved_after_its_end",
    "; pass the folder that `heron study": "tests/studies/test_results.py::"
    "test_what_is_no_study_is_refused",
    ", which FAISS cannot search on a GPU; remove ": "tests/retrieval/test_gpu.py::"
    "test_a_kind_without_a_search_on_gpus_is_refused",
    "is only fetched if you name it; add --d": f"{BY_HAND}::"
    "test_an_address_that_an_index_names_and_the_user_gives",
    "' is damaged": f"{BY_HAND}::test_a_damaged_picture_is_named_by_verify",
    "was built from vectors in memory and has no data": f"{BY_HAND}::"
    "test_shards_that_an_index_does_not_name",
    " already has an option named ": "tests/sources/test_own_source.py::"
    "test_an_option_that_the_command_has",
    "the protocol needs the ": "tests/data/test_written_roles.py::"
    "test_labels_that_are_too_many_are_not_read",
    "`heron shards verify` names the sample": f"{BY_HAND}::"
    "test_an_altered_shard_s_sample_is_named_by_verify",
    "choose one: try `heron shards": "tests/sources/test_foreign.py::"
    "test_of_several_readings_the_error_names_one_that_works",
    "; see `heron shards index --": "tests/sources/test_foreign.py::test_the_command_line",
    "command again, with fewer --workers if memory is short": "tests/base/test_workers.py::"
    "test_fewer_workers_go_on",
    "/proc/meminfo has no MemAvailable; give --memory": f"{BY_HAND}::"
    "test_a_machine_that_does_not_say_what_is_free",
}

NEEDS = {
    " has no GPU, because there are only ": "several GPUs, and a scheduler that shows them",
    " processes on one; for several, use": "two machines: tests/launch/test_two_hosts.py "
    "runs hosts/pretrain.sh on two, and test_slurm.py slurm/pretrain.sbatch by a SLURM",
    "but the launcher started one, without a rank": "half a minute of accelerate's "
    "launcher: test_on_ray.py's test_strategies_and_workers_here runs it with cpu.yaml",
}
