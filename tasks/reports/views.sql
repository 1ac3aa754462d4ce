-- One row per span of a run, of every attempt. A batch that is sealed is read from its Parquet, one
-- that is not from its journal: the rows are the same, and so are their types.
create or replace temp view spans as

select * from sealed

union all by name

select * from journalled
