-- One row per error, the latest first: of attempts that failed, and of calls that the door refused;
-- how often, and in which rollouts: the first three by name, and the number of the others. The
-- table spans has the spans of a run, or of some of its batches.
select
    kind,
    error,
    times,
    array_to_string(rollouts[:3], ', ')
    || if(len(rollouts) > 3, format(' and {} more', len(rollouts) - 3), '') as rollouts

from (

    select
        kind,
        error_type || ': ' || error_message as error,
        count(*) as times,
        list(distinct rollout_id order by rollout_id) as rollouts,
        max(ended) as latest

    from spans
    where kind in ('error', 'refused')
    group by kind, error

)
order by latest desc, error
