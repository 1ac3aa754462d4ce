-- Views over runs, for people. The tables sealed, journalled, trajectories, datums, steps and
-- evaluations are files as they were written; `run` is the name of the run.

-- spans: one row per span of a run, of every attempt. A batch that is sealed is read from its
-- Parquet, one that is not from its journal: the rows are the same, and so are their types.
create temp view spans as

select
    *
from sealed

union all by name

select
    *
from journalled;

-- calls: one row per answered model call, of every attempt.
create temp view calls as

select
    run,
    split_of(group_id) as split,
    step,
    batch,
    group_id,
    rollout_id,
    attempt,
    role,
    call,
    started,
    epoch(ended) - epoch(started) as seconds,
    gen_ai_request_model as model,
    gen_ai_usage_input_tokens as prompt_tokens,
    gen_ai_usage_output_tokens as sampled_tokens,
    kept_tokens,
    kept_how,
    gen_ai_response_finish_reasons[1] as finish_reason,
    messages ->> '$[#-1].content' as asked,
    spoken(reply) as said,
    coalesce(json_array_length(reply -> '$.tool_calls'), 0) as tool_calls,
    (attributes ->> '$.cost')::double as cost,
    coalesce(recalled, false) as recalled,
    policy_version,
    coalesce(run_id, run) as asked_by
from spans
where kind = 'llm' and error_type is null;

-- rollouts: one row per rollout, by the attempt that earned the reward, or else the last one. A
-- rollout that has neither a reward nor an error is under way, or was interrupted.
create temp view rollouts as

select
    run,
    split_of(any_value(spans.group_id)) as split,
    any_value(step) as step,
    any_value(batch) as batch,
    any_value(spans.group_id) as group_id,
    rollout_id,
    attempt,
    any_value(attempts) as attempts,
    any_value(counted.reward) as reward,
    any_value(has_ended) as ended,
    any_value(error_type) filter (where kind = 'reward') as rewarded_error,
    any_value(error_type) filter (where kind = 'error') as error_type,
    any_value(error_message) filter (where kind = 'error') as error_message,
    count(*) filter (where kind = 'llm' and error_type is null) as calls,
    epoch(max(ended)) - epoch(min(started)) as seconds,
    any_value(attributes ->> '$.example_id')::bigint as example_id,
    any_value(attributes -> '$.example')::json as example
from spans
join rollout_attempts('spans') as counted using (run, rollout_id, attempt)
group by run, rollout_id, attempt;

-- groups: one row per group, with the rewards of its rollouts. A uniform group has equal rewards,
-- which compare to nothing; a group without a reward is neither uniform nor not.
create temp view groups as

select
    run,
    split,
    step,
    group_id,
    any_value(example_id) as example_id,
    count(*) as rollouts,
    count(error_type) as failed,
    avg(reward) as reward,
    stddev_pop(reward) as reward_std,
    min(reward) as lowest,
    max(reward) as highest,
    is_uniform(min(reward), max(reward)) as uniform
from rollouts
group by run, split, step, group_id;

-- failures: one row per rollout that failed; training comes first, and its latest step.
create temp view failures as

select
    run,
    rollout_id,
    error_type,
    error_message
from rollouts
where error_type is not null
order by split <> 'train', step desc, rollout_id;
