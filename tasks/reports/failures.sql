-- One row per error, the latest first: of attempts that failed, and of calls that the door refused;
-- how often, and in which rollouts. The table spans has the spans of a run, or of some of its batches.
select
    kind,
    error_type || ': ' || error_message as error,
    count(*) as times,
    list(distinct rollout_id order by rollout_id) as rollouts

from spans
where kind in ('error', 'refused')
group by kind, error
order by max(ended) desc, error
