-- One row per error, the latest first: of attempts that failed, and of calls that the door refused;
-- how often, with how many messages, of which the commonest is shown, and in which rollouts: the
-- first three by name, and the number of the others. Errors of a type that came at the same place
-- are one, and so are those that are equal but for numbers. The table spans has the spans of a run,
-- or of some of its batches.
select
    kind,
    error,
    times,
    messages,
    array_to_string(rollouts[:3], ', ')
    || if(len(rollouts) > 3, format(' and {} more', len(rollouts) - 3), '') as rollouts
from (
    select
        kind,
        mode(error_type || ': ' || error_message order by error_message) as error,
        count(*) as times,
        count(distinct error_message) as messages,
        list(distinct rollout_id order by rollout_id) as rollouts,
        max(ended) as latest
    from spans
    where kind in ('error', 'refused')
    group by
        kind,
        error_type,
        coalesce(
            nullif(regexp_extract(error_message, $place), ''),
            regexp_replace(error_message, '\d+', '0', 'g')
        )
)
order by latest desc, error
